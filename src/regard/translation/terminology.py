"""Words that translations have to hold: a terminology, and the tokens of its phrases in a vocabulary."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from regard.errors import ConfigurationError, CorpusError, VocabularyError
from regard.translation.constrained_search import Phrase, WordEdges
from regard.translation.corpus import read_lines
from regard.translation.tokenization import SPACE
from regard.translation.vocabulary import LineVocabulary

_LOOSE = re.compile(r"[\u0e00-\u0fff\u1000-\u11ff\u1780-\u17ff\u2e80-\ud7ff\uf900-\ufaff]")
"""Scripts whose words touch what follows, as particles and endings: Hangul, kana, Chinese characters, Thai and more."""


class FoundTerm(NamedTuple):
    """A phrase that a translation has to say, and which words of the source it translates, from 0: none if any."""

    text: str
    words: range = range(0)


class Terminology:
    """What a translation has to say: a phrase wherever the source has another one, and phrases in every translation.

    A phrase of the source is found as whole words, whatever their case; of two that begin at one place it is the
    longer. Where it stands twice, the translation says its term twice.

    Args:
        of_source: the phrase of the translation for each phrase of the source.
        always: phrases of every translation.

    Raises:
        ConfigurationError: a phrase is empty, or two of the source differ in case alone.

    >>> terms = Terminology({"bank": "rive", "bank account": "compte"}, always=["merci"])
    >>> for found in terms.of("The Bank of the river, and a bank account at the banker's."):
    ...     print(found.text, list(found.words))
    rive [1]
    compte [7, 8]
    merci []
    """

    def __init__(self, of_source: Mapping[str, str] | None = None, *, always: Sequence[str] = ()) -> None:
        if isinstance(always, str):
            raise ConfigurationError(f"always is one text, {always[:40]!r}; it needs to be a list of phrases")
        self._sources, self._targets = [" ".join(phrase.split()) for phrase in of_source or {}], dict[str, str]()
        for source, target in (of_source or {}).items():
            key = _key(source)
            if not key or not target.strip():
                raise ConfigurationError(f"the term {source!r}: {target!r} has an empty side; it needs words on both")
            if key in self._targets:
                raise ConfigurationError(f"{source!r} has two terms, {self._targets[key]!r} and {target!r}: leave one")
            self._targets[key] = target.strip()
        if not all(phrase.strip() for phrase in always):
            raise ConfigurationError("words that are forced are empty; name some, or force none")
        self.always = tuple(phrase.strip() for phrase in always)

    @classmethod
    def read(cls, path: str | Path, *, always: Sequence[str] = ()) -> Terminology:
        """Read a file with a phrase of the source, a tab, and the phrase of the translation in each line.

        Empty lines count for nothing; the file may be compressed by gzip.

        Raises:
            CorpusError: it cannot be read, or a line has no tab or more than one, an empty side, or another term for a
                phrase that had one.
        """
        found: dict[str, tuple[int, str]] = {}
        for number, line in enumerate(read_lines(Path(path)), start=1):
            if not line.strip():
                continue
            source, *target = line.split("\t")
            if len(target) != 1 or not source.strip() or not target[0].strip():
                raise CorpusError(
                    f"{path}, line {number}: {line[:80]!r} is no term; it needs a phrase of the source, one tab, and "
                    "the phrase of the translation"
                )
            before, term = found.setdefault(_key(source), (number, target[0].strip()))
            if term != target[0].strip():
                raise CorpusError(
                    f"{path}, line {number}: {source.strip()!r} is {target[0].strip()!r} here, and {term!r} in line "
                    f"{before}; leave one of them"
                )
        return cls({source: target for source, (_, target) in found.items()}, always=always)

    def __bool__(self) -> bool:
        return bool(self._targets or self.always)

    def __len__(self) -> int:
        return len(self._targets) + len(self.always)

    @functools.cached_property
    def source_words(self) -> frozenset[str]:
        """The words of the phrases of the source."""
        return frozenset(word for phrase in self._sources for word in phrase.split())

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        phrases = sorted(self._sources, key=len, reverse=True)
        return re.compile("|".join(map(_whole_words, phrases)) or r"(?!)", re.IGNORECASE)

    def of(self, text: str) -> list[FoundTerm]:
        """The phrases that the translation of a text has to say, in the order of the source, a phrase for each time.

        Words of the text are what white space separates.
        """
        found = []
        for place in self._pattern.finditer(text):
            first = len(text[: place.start()].split()) - (
                not text[: place.start()][-1:].isspace() and place.start() > 0
            )
            found.append(FoundTerm(self._targets[_key(place[0])], range(first, first + len(place[0].split()))))
        return found + [FoundTerm(phrase) for phrase in self.always]

    def check(self, vocabulary: LineVocabulary) -> None:
        """Check that a vocabulary can write all phrases.

        Raises:
            VocabularyError: it cannot.
        """
        for phrase in (*self._targets.values(), *self.always):
            _ids(phrase, vocabulary)


def _key(phrase: str) -> str:
    return " ".join(phrase.casefold().split())


def _whole_words(phrase: str) -> str:
    """A pattern of the phrase that no letter touches, but for scripts whose words do."""
    before = r"(?<!\w)" if phrase[0].isalnum() and not _LOOSE.match(phrase[0]) else ""
    behind = r"(?!\w)" if phrase[-1].isalnum() and not _LOOSE.match(phrase[-1]) else ""
    return before + r"\s+".join(map(re.escape, phrase.split(" "))) + behind


def phrases_of(terms: Sequence[FoundTerm], source_words: Sequence[int], vocabulary: LineVocabulary) -> list[Phrase]:
    """The tokens of each term in the vocabulary of the translation, equal ones as one that is said several times.

    source_words: the word of each token of the source.

    Raises:
        VocabularyError: the vocabulary cannot write one of them.
    """
    places: dict[tuple[int, ...], list[list[int]]] = {}
    for term in terms:
        some = [place for place, word in enumerate(source_words) if word in term.words]
        places.setdefault(_ids(term.text, vocabulary), []).append(some)
    return [Phrase(ids, len(some), tuple(itertools.chain.from_iterable(some))) for ids, some in places.items()]


def _ids(text: str, vocabulary: LineVocabulary) -> tuple[int, ...]:
    ids = tuple(i for i in vocabulary.encode(text) if i == vocabulary.special.unknown or not vocabulary.is_special(i))
    if not ids or vocabulary.special.unknown in ids:
        lacks = vocabulary.unknown_words(text) or vocabulary.unknown_characters(text)
        names = f": it lacks {', '.join(map(repr, lacks))}" if lacks else ""
        raise VocabularyError(f"{text!r} cannot be written with the target vocabulary{names}; force other words")
    # Where words have no spaces between them, one before the phrase is not a part of it.
    return ids[1:] if _LOOSE.match(text) and vocabulary.tokens(ids[:1]) == [SPACE] and len(ids) > 1 else ids


def word_edges(vocabulary: LineVocabulary) -> WordEdges:
    """Find which tokens of a vocabulary go on with a word, and which end in a letter of a script with spaces."""
    joins, ends = torch.zeros(len(vocabulary), dtype=torch.bool), torch.zeros(len(vocabulary), dtype=torch.bool)
    for i in range(len(vocabulary)):
        if vocabulary.is_special(i):
            continue
        [label] = vocabulary.tokens([i])
        joins[i] = _is_letter(label[:1]) and len(set(vocabulary.words([i, i]))) == 1
        ends[i] = _is_letter(label[-1:])
    return WordEdges(joins, ends)


def _is_letter(character: str) -> bool:
    return character.isalnum() and not _LOOSE.match(character)
