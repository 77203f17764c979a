"""What a page is told of words: which tokens make them, links between them, and which translation they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import AtlasError, CorpusError
from ..heads.links import SentenceLinks, alignment_error_rate, word_links
from .atlas import AttentionMap
from .atlas.translations import Numbers, to_json

MOST_WORDS = 512
"""Of longer maps, or maps of more words, nothing is told: a page could not hold all of their weights."""
MOST_CELLS = 2**16
"""Of maps with more pairs no head's links are counted beforehand,"""
MOST_HEADS = 4096
"""nor of more heads than these."""


class Wording:
    """Lists of word numbers, each once, and what each of some maps has of them, ready for JSON.

    maps: by map, what it has of words. metrics: by map, numbers for each head by their names.
    """

    def __init__(self, maps: Sequence[AttentionMap], longest: int) -> None:
        self._numbers: dict[Numbers, int] = {}
        self._longest = longest
        self._room = MOST_HEADS
        self.metrics = [self._rates(of) for of in maps]
        self.maps: list[dict[str, Any]] = [self._of(of) for of in maps]

    @property
    def lists(self) -> list[list[int]]:
        """For each list the number of each token's word, -1 for none."""
        return [list(numbers) for numbers in self._numbers]

    def _of(self, of: AttentionMap) -> dict[str, Any]:
        """Its hypothesis, its lists of words by their places in `lists`, None where each token is one, and its gold."""
        told: dict[str, Any] = {}
        if of.hypothesis is not None:
            text = of.hypothesis.text
            shown = text if len(text) <= self._longest else text[: self._longest - 1] + "…"
            told["hypothesis"] = {"rank": of.hypothesis.rank, "text": shown, "score": of.hypothesis.score}
        sides = of.query_words, of.key_words
        if max(of.queries, of.keys) > MOST_WORDS or max((max(side) for side in sides if side), default=0) >= MOST_WORDS:
            return told
        if any(side is not None for side in sides):
            told["words"] = [self._place(side) for side in sides]
        if of.gold is not None:
            told["gold"] = to_json(of.gold)
        return told

    def _rates(self, of: AttentionMap) -> dict[str, list[float | None]]:
        """How far the argmax links of each head are from the gold ones, where a map has some and is short."""
        if of.gold is None or of.queries * of.keys > MOST_CELLS or of.heads > self._room:
            return {}
        self._room -= of.heads
        return {"AER_argmax": [_error_rate(of, of.gold, head) for head in range(of.heads)]}

    def _place(self, numbers: Numbers | None) -> int | None:
        return None if numbers is None else self._numbers.setdefault(numbers, len(self._numbers))


def _error_rate(of: AttentionMap, gold: SentenceLinks, head: int) -> float | None:
    source = range(of.keys) if of.key_words is None else of.key_words
    target = range(of.queries) if of.query_words is None else of.query_words
    try:
        weights = torch.from_numpy(of.weights(head, slice(0, of.queries), slice(0, of.keys)))
        return alignment_error_rate([word_links(weights, source, target)], [gold.sure], [gold.possible])
    except (AtlasError, CorpusError):  # a file that cannot be read so far, or neither links nor sure ones
        return None
