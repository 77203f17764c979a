"""Pairs of sentences made from others: cleaned, joined to longer ones, with other names and numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from regard.translation.placeholders import Placeholders

Pair = tuple[str, str]

FREE_CHARACTERS = 20
"""By so many characters a side may be longer than its ratio to the other allows: "OK." is "D'accord."."""


def clean(pairs: Iterable[Pair], longest: int, ratio: float) -> list[Pair]:
    """The pairs with single spaces, each once; without those of more than `longest` words on a side, or of which a side
    has more than `ratio` times the characters of the other, and 20.

    >>> clean([("Go  on.", "Continue."), ("Go on.", "Continue."), ("Hi.", "x" * 40)], longest=9, ratio=3.0)
    [('Go on.', 'Continue.')]
    """
    kept: dict[Pair, None] = {}
    for pair in pairs:
        source, target = (re.sub(r"[ \t\r\n\f\v]+", " ", side).strip() for side in pair)
        few, many = sorted((len(source), len(target)))
        words = max(source.count(" "), target.count(" ")) + 1
        if few and words <= longest and many <= ratio * few + FREE_CHARACTERS:
            kept[source, target] = None
    return list(kept)


def joined(pairs: Sequence[Pair], share: float, draw: random.Random) -> list[Pair]:
    """For a share of the pairs a longer one: with its next one or two, or with one or two of the whole text, drawn.

    >>> joined([("Go.", "Va."), ("Hi.", "Salut.")], 0.9, random.Random(3))
    [('Go. Hi.', 'Va. Salut.'), ('Hi. Hi.', 'Salut. Salut.')]
    """
    found = []
    for row, pair in enumerate(pairs):
        if draw.random() >= share:
            continue
        more, neighbours = draw.randint(1, 2), draw.random() < 0.5
        rows = [(row + step + 1) % len(pairs) if neighbours else draw.randrange(len(pairs)) for step in range(more)]
        parts = [pair, *(pairs[other] for other in rows)]
        found.append((" ".join(source for source, _ in parts), " ".join(target for _, target in parts)))
    return found


@dataclass(frozen=True)
class PairVariations:
    """Other pairs of the same form: rare names in place of frequent ones, digits in place of words for numbers.

    frequent: names that a model sees often; rare: those that take their place. numbers: words, and their translations.
    """

    placeholders: Placeholders
    frequent: frozenset[str]
    rare: tuple[str, ...]
    numbers: Mapping[str, str]

    @classmethod
    def of_pairs(cls, pairs: Sequence[Pair], numbers: Mapping[str, str], seed: int) -> Self:
        """Learn from pairs which names there are; `seed` is that of the placeholders' order."""
        sources, targets = zip(*pairs, strict=True)
        placeholders = Placeholders.learn(sources, targets)
        every = Placeholders.learn(sources, targets, frequent=None)
        rare = dict.fromkeys(
            part for source, target in pairs for part in _copied(placeholders, source, target) if part[0].isupper()
        )
        return cls(placeholders, placeholders.words - every.words, tuple(sorted(rare)), numbers)

    def varied(self, pair: Pair, draw: random.Random) -> Pair | None:
        """A pair with other names and numbers; None where it has none that both sides have.

        >>> variations = PairVariations(Placeholders(frozenset()), frozenset(["Tom"]), ("Ngozi",), {"two": "deux"})
        >>> variations.varied(("Tom has two cats.", "Tom a deux chats."), random.Random(1))
        ('Ngozi has 1133 cats.', 'Ngozi a 1133 chats.')
        """
        source, target = pair
        for name in sorted(self.frequent):
            if self.rare:
                source, target = _replaced(source, target, name, name, draw.choice(self.rare))
        for word, translation in self.numbers.items():
            digits = str(draw.choice((draw.randint(2, 99), draw.randint(100, 9999))))
            for spelled in (word, word.capitalize()):
                source, target = _replaced(source, target, spelled, translation, digits)
        return None if (source, target) == pair else (source, target)


def _replaced(source: str, target: str, word: str, translation: str, by: str) -> Pair:
    """Replace a word that the source has once and its translation that the target has once, in any case."""
    if word not in source:
        return source, target
    said, heard = rf"(?<![\w-]){re.escape(word)}(?![\w-])", rf"(?i)(?<![\w-]){re.escape(translation)}(?![\w-])"
    if len(re.findall(said, source)) != 1 or len(re.findall(heard, target)) != 1:
        return source, target
    return re.sub(said, by, source), re.sub(heard, by, target)


def _copied(placeholders: Placeholders, source: str, target: str) -> list[str]:
    """The parts of a source that its target has too."""
    placed = placeholders.take_out(source)
    return [part for part in placed.parts if part in target]
