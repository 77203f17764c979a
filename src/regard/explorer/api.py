"""Read-only query API of an atlas, used by the server, the static page and the notebook widget.

Arrays are float32, row-major. Arguments are checked against the atlas before anything is computed. `WordMetadata` has
what the page needs about words: which tokens form them, gold links between them, and which translation a map is of.
`read_query` parses the parameters of a request strictly: unknown, missing, repeated or malformed ones fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qsl

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import AtlasError, ConfigurationError, CorpusError
from ..heads.word_alignment import SentenceLinks, alignment_error_rate, word_links
from .atlas import Atlas, AttentionMap
from .atlas.translation_info import WordNumbers, to_json
from .kept_weights import By, Indices, RankedHead, indices, kept_values, rank_heads, top_values

MOST_WORDS = 512
"""Words of maps with more rows, columns or words are left out: a page could not hold all weights of these."""
MOST_LINK_CELLS = 2**16
"""Alignment error rates are computed for maps with at most so many pairs,"""
MOST_HEADS = 4096
"""and for at most so many heads in all."""


class WordMetadata:
    """Words, hypotheses and gold links of maps as JSON; equal lists of word numbers are stored once.

    maps: by map, what it has of words. metrics: by map, numbers for each head by their names.
    """

    def __init__(self, maps: Sequence[AttentionMap], longest: int) -> None:
        self._numbers: dict[WordNumbers, int] = {}
        self._longest = longest
        self._room = MOST_HEADS
        self.metrics = [self._rates(of) for of in maps]
        self.maps: list[dict[str, Any]] = [self._metadata(attention_map) for attention_map in maps]

    @property
    def lists(self) -> list[list[int]]:
        """The distinct lists of word numbers, one number for each token, -1 for tokens of no word."""
        return [list(numbers) for numbers in self._numbers]

    def _metadata(self, of: AttentionMap) -> dict[str, Any]:
        """Hypothesis, word lists as indices into `lists` (None: each token is a word), and gold links of a map."""
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
        """Alignment error rate of each head's argmax links, for short maps that have gold links."""
        if of.gold is None or of.queries * of.keys > MOST_LINK_CELLS or of.heads > self._room:
            return {}
        self._room -= of.heads
        return {"AER_argmax": [_error_rate(of, of.gold, head) for head in range(of.heads)]}

    def _place(self, numbers: WordNumbers | None) -> int | None:
        return None if numbers is None else self._numbers.setdefault(numbers, len(self._numbers))


def _error_rate(of: AttentionMap, gold: SentenceLinks, head: int) -> float | None:
    source = range(of.keys) if of.key_words is None else of.key_words
    target = range(of.queries) if of.query_words is None else of.query_words
    try:
        weights = torch.from_numpy(of.weights(head, slice(0, of.queries), slice(0, of.keys)))
        return alignment_error_rate([word_links(weights, source, target)], [gold.sure], [gold.possible])
    except (AtlasError, CorpusError):  # a file that cannot be read so far, or neither links nor sure ones
        return None


Floats = NDArray[np.float32]
Reduce = Literal["mean", "max"]

VERSION = 1
MAX_TILE_SIDE = 256
"""The most rows, and the most columns, of the tile of weights in one request."""
MOST_TOKENS = 4096
"""The most tokens in one request."""
MOST_CHARACTERS = 1000
"""The longest token; longer ones are truncated."""
MOST_CELLS = 2**22
"""The most pyramid cells in one request: 16 MB."""


class AtlasAPI:
    """Read-only queries of an atlas by indices of maps, heads, rows and columns; ranges are half-open.

    Raises:
        AtlasError: there is no map in the atlas.

    >>> import torch
    >>> answers = AtlasAPI(Atlas.from_weights({"head": torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])}, tokens=["a", "b"]))
    >>> answers.tokens(0, "key", 0, 2), answers.weights(0, 0, (1, 2), (0, 2)).tolist()
    (['a', 'b'], [[0.25, 0.75]])
    """

    def __init__(self, atlas: Atlas) -> None:
        if not atlas.maps:
            raise AtlasError("the atlas has no map of attention in it, so there is nothing to show")
        self.atlas = atlas
        self._maps = atlas.maps
        self._title = atlas.title
        self._profiles = list(atlas.maps[0].profiles)

    def meta(self) -> dict[str, Any]:
        """Metadata as JSON: the title, and the sizes, pyramid levels, metrics and roles of each map."""
        wording = WordMetadata(self._maps, MOST_CHARACTERS)
        numbers: dict[tuple[str, ...], int] = {}
        return {
            "version": VERSION,
            "title": self._title,
            "overview": True,
            "profiles": self._profiles,
            "words": wording.lists,
            "maps": [
                {**_described(of, more), "texts": _texts(of, numbers), **told}
                for of, told, more in zip(self._maps, wording.maps, wording.metrics, strict=True)
            ],
        }

    def tokens(self, map: int, side: str, start: int, stop: int) -> list[str]:  # noqa: A002
        """Tokens start to stop - 1 of the queries ("query") or keys ("key"), truncated to MOST_CHARACTERS.

        Raises:
            AtlasError: there is no such map, side or token; too many at a time.
        """
        of = self._map(map)
        if side not in ("query", "key"):
            raise AtlasError(f"a map has tokens of the side 'query' and of the side 'key'; there is no side {side!r}")
        count = of.queries if side == "query" else of.keys
        _check_range("tokens", (start, stop), count, MOST_TOKENS)
        words = of.query_tokens if side == "query" else of.key_tokens
        return [shortened(word) for word in words[start:stop]]

    def pooled(self, map: int, head: int, level: int, reduce: str) -> Floats:  # noqa: A002
        """One pooled level of a head's pyramid, (rows, columns).

        NaN where a cell has no pair that exists, infinity where it has one and a row of the cell attends to NaN.

        Raises:
            AtlasError: there is no such map, head, level or way to reduce; the level has too many cells.
        """
        of = self._map(map)
        _check_number("level", level, len(of.levels), of)
        _check_cells(math.prod(of.levels[level]))
        return np.asarray(of.pooled_pairs(head, level, _reduce(reduce)), dtype=np.float32)

    def overview(self, map: int, reduce: str) -> Floats:  # noqa: A002
        """The coarsest level of all heads of a map, (heads, rows, columns); NaN and infinity as in `pooled`.

        Raises:
            AtlasError: there is no such map or way to reduce; there are too many cells.
        """
        of, how = self._map(map), _reduce(reduce)
        _check_cells(of.heads * math.prod(of.levels[-1]))
        last = len(of.levels) - 1
        return np.stack([of.pooled_pairs(head, last, how) for head in range(of.heads)]).astype(np.float32)

    def weights(self, map: int, head: int, rows: tuple[int, int], columns: tuple[int, int]) -> Floats:  # noqa: A002
        """The exact weights of a head, from rows[0] to rows[1] - 1 and so for columns, as `displayed_weights` has them.

        Raises:
            AtlasError: there is no such map, head, row or column; more than MAX_TILE_SIDE × MAX_TILE_SIDE.
        """
        of = self._map(map)
        _check_number("head", head, of.heads, of)
        _check_range("rows", rows, of.queries, MAX_TILE_SIDE)
        _check_range("columns", columns, of.keys, MAX_TILE_SIDE)
        return displayed_weights(of, head, slice(*rows), slice(*columns))

    def profile(self, map: int, head: int, which: str) -> Floats:  # noqa: A002
        """Profile of a head by name: "entropy", (M,), in nats, "largest" weight, (M,), or weight "received", (N,).

        Raises:
            AtlasError: there is no such map, head or profile.
        """
        of = self._map(map)
        if which not in self._profiles:
            known = ", ".join(repr(name) for name in self._profiles)
            raise AtlasError(f"a map has the profiles {known}; there is no {which[:40]!r}")
        return head_profile(of, head, which)

    def norms(self, map: int, head: int) -> Floats:  # noqa: A002
        """‖v_j W_h‖ of each key of a head, (N,): a weight times it is the norm of what the key contributes.

        Raises:
            AtlasError: there is no such map or head; the atlas has no norms of it.
        """
        return self._map(map).value_norms(head)

    def pooled_contributions(self, map: int, head: int, level: int, reduce: str) -> Floats:  # noqa: A002
        """One level of a head's pyramid of contributions, (rows, columns); NaN and infinity as in `pooled`.

        Raises:
            AtlasError: there is no such map, head, level or way to reduce; no norms; the level has too many cells.
        """
        of = self._map(map)
        _check_number("level", level, len(of.levels), of)
        _check_cells(math.prod(of.levels[level]))
        return np.asarray(of.pooled_contributions(head, level, _reduce(reduce)), dtype=np.float32)

    def top(self, map: int, head: int, side: str, index: int, count: int, by: str) -> dict[str, Any]:  # noqa: A002
        """The largest weights or contributions of a row or a column, as `top_values` has them.

        Raises:
            AtlasError: there is no such map, head, side, row or column; no norms; too many.
        """
        found = top_values(self._map(map), head, side, index, count, by)
        return {**found, "tokens": [shortened(word) for word in found["tokens"]]}

    def kept(self, map: int, queries: Indices, keys: Indices, by: By) -> Floats:  # noqa: A002
        """For each head of a map the mean over queries of the sum over keys, (heads,), as `kept_values` has it.

        Raises:
            AtlasError: there is no such map, row or column; no norms.
        """
        return kept_values(self._map(map), queries, keys, by)

    def ranking(self, map: int, queries: Indices, keys: Indices, by: By) -> dict[str, Any]:  # noqa: A002
        """All heads that read the same tokens as a map, ranked by that number, as JSON; None for NaN and infinity.

        Raises:
            AtlasError: as `kept`.
        """
        kept_values(self._map(map), queries, keys, by)  # says what is wrong of this map
        return _listed(rank_heads(self.atlas, queries, keys, map=map, by=by))

    def changes(self, other: AtlasAPI, map: int, queries: Indices, keys: Indices) -> dict[str, Any]:  # noqa: A002
        """The same heads, ranked by how much they changed since another atlas, as JSON.

        Raises:
            AtlasError: there is no such map, row or column; the other atlas has it not, or in another length.
        """
        self._map(map)
        return _listed(rank_heads(self.atlas, queries, keys, map=map, by=other.atlas))

    def _map(self, number: int) -> AttentionMap:
        if not 0 <= number < len(self._maps):
            raise AtlasError(f"the atlas has the maps 0 to {len(self._maps) - 1}; there is no map {number}")
        return self._maps[number]


def displayed_weights(of: AttentionMap, head: int, rows: slice, columns: slice) -> Floats:
    """Weights in the page's encoding: NaN where a pair does not exist, infinity in rows that attend to NaN.

    JSON and half precision hold both; a page could not tell two kinds of NaN apart.
    """
    weights = np.asarray(of.weights(head, rows, columns), dtype=np.float32)
    broken = of.attends_to_nan(head)[rows]
    if broken.any():
        weights = np.where(broken[:, None], np.float32(np.inf), weights)
    exists = of.exists(head, rows, columns)
    return weights if exists.all() else np.where(exists, weights, np.float32(np.nan))


def head_profile(of: AttentionMap, head: int, which: str) -> Floats:
    """One profile of a head by its name in `AttentionMap.profiles`."""
    tell = {"entropy": of.entropy, "received": of.received, "largest": of.largest}[which]
    return np.asarray(tell(head), dtype=np.float32)


def _listed(heads: Sequence[RankedHead]) -> dict[str, Any]:
    """A ranking as JSON."""
    return {
        "heads": [
            {"map": each.map, "head": each.head, "value": each.value if math.isfinite(each.value) else None}
            for each in heads
        ]
    }


def shortened(word: str) -> str:
    """Truncate a token to MOST_CHARACTERS; some have a million.

    >>> len(shortened("a" * 5000)), shortened("short")
    (1000, 'short')
    """
    return word if len(word) <= MOST_CHARACTERS else word[: MOST_CHARACTERS - 1] + "…"


def _described(of: AttentionMap, more: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    broken = [int(of.attends_to_nan(head).sum()) for head in range(of.heads)]
    return {
        # How many rows of each head attend to NaN, where any does.
        **({"broken": broken} if any(broken) else {}),
        "name": of.name,
        "call": of.call,
        "sequence": of.sequence,
        "kind": of.kind,
        **({} if of.operator == "softmax" else {"operator": of.operator}),
        **({"norms": True} if of.has_value_norms else {}),
        "heads": of.heads,
        "queries": of.queries,
        "keys": of.keys,
        "levels": [list(shape) for shape in of.levels],
        "cells": [list(of.cell(level)) for level in range(len(of.levels))],
        "metrics": {**{name: _numbers(values.tolist()) for name, values in of.metrics.items()}, **more},
        "roles": [[dict(role) for role in roles] for roles in of.roles],
    }


def _texts(of: AttentionMap, numbers: dict[tuple[str, ...], int]) -> list[int]:
    """The numbers of the texts that queries and keys are of; equal tokens get equal numbers, which `numbers` holds."""
    return [numbers.setdefault(tuple(tokens), len(numbers)) for tokens in (of.query_tokens, of.key_tokens)]


def _numbers(values: Sequence[float]) -> list[float | None]:
    """Numbers as JSON has them: None for NaN and infinity."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _reduce(name: str) -> Reduce:
    if name == "mean" or name == "max":
        return name
    raise AtlasError(f"a level has the 'mean' and the 'max' of its cells; there is no {name[:40]!r}")


def _check_number(what: str, number: int, count: int, of: AttentionMap) -> None:
    if not 0 <= number < count:
        raise AtlasError(f"the map {of.name[:80]!r} has the {what}s 0 to {count - 1}; there is no {what} {number}")


def _check_range(what: str, stretch: tuple[int, int], count: int, most: int) -> None:
    start, stop = stretch
    if not 0 <= start < stop <= count:
        raise AtlasError(
            f"there are {count:,} {what}, and they were asked for from {start} to {stop}; a start needs to be before "
            f"its stop, and the stop at most {count}"
        )
    if stop - start > most:
        raise AtlasError(
            f"{stop - start:,} {what} were asked for at once; at most {most:,} are returned: ask for parts"
        )


def _check_cells(count: int) -> None:
    if count > MOST_CELLS:
        raise AtlasError(f"{count:,} cells were asked for at once; at most {MOST_CELLS:,} are returned: ask for less")


LONGEST_QUERY = 500
"""The longest query string, in bytes."""

Reader = Callable[[str, str], Any]

_NUMBER = r"(?:0|[1-9][0-9]{0,11})"
_WHOLE = re.compile(_NUMBER, re.ASCII)
_SPAN = re.compile(f"({_NUMBER})-({_NUMBER})", re.ASCII)


def number(name: str, text: str) -> int:
    """A whole number of at least 0, in plain digits.

    >>> number("head", "3")
    3
    """
    if not _WHOLE.fullmatch(text):
        raise ConfigurationError(
            f"{name} is {text[:40]!r}; it needs a whole number of at least 0, in digits without leading zeros"
        )
    return int(text)


def span(name: str, text: str) -> tuple[int, int]:
    """A range START-STOP of whole numbers.

    >>> span("rows", "0-256")
    (0, 256)
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{name} is {text[:40]!r}; it needs a start and a stop, such as {name}=0-256")
    return int(found[1]), int(found[2])


def word(name: str, text: str) -> str:
    """A non-empty string.

    >>> word("side", "key")
    'key'
    """
    if not text:
        raise ConfigurationError(f"{name} is empty; it needs a word")
    return text


QUERIES: dict[str, dict[str, Reader]] = {
    "meta": {},
    "tokens": {"map": number, "side": word, "start": number, "stop": number},
    "pooled": {"map": number, "head": number, "level": number, "reduce": word},
    "overview": {"map": number, "reduce": word},
    "weights": {"map": number, "head": number, "rows": span, "columns": span},
    "profile": {"map": number, "head": number, "which": word},
    "norms": {"map": number, "head": number},
    "pooled_contributions": {"map": number, "head": number, "level": number, "reduce": word},
    "top": {"map": number, "head": number, "side": word, "index": number, "count": number, "by": word},
    "kept": {"map": number, "queries": indices, "keys": indices, "by": word},
    "ranking": {"map": number, "queries": indices, "keys": indices, "by": word},
}
"""The parameters of each request by its name, which is that of a method of `AtlasAPI`."""
CHANGES: dict[str, Reader] = {"other": number, "map": number, "queries": indices, "keys": indices}
"""The parameters of the request "changes", which is about two atlases."""


def read_query(query: bytes, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Parse a query string whose parameters are the names of `readers`, each exactly once.

    Raises:
        ConfigurationError: it asks for anything else.

    >>> read_query(b"map=0&rows=0-16", {"map": number, "rows": span})
    {'map': 0, 'rows': (0, 16)}
    """
    return read_pairs(_pairs(query), readers)


def read_pairs(found: Mapping[str, str], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Parse parameters that were separated already; `readers` has the parser of each required name.

    Raises:
        ConfigurationError: it asks for anything else.

    >>> read_pairs({"map": "0"}, {"map": number})
    {'map': 0}
    """
    needs = f"it needs {', '.join(readers)}" if readers else "it needs none"
    for name in found:
        if name not in readers:
            raise ConfigurationError(f"there is no parameter {name[:40]!r}; {needs}")
    missing = [name for name in readers if name not in found]
    if missing:
        raise ConfigurationError(f"the parameter {missing[0]!r} is missing; {needs}")
    return {name: reader(name, found[name]) for name, reader in readers.items()}


def _pairs(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    if len(query) > LONGEST_QUERY:
        raise ConfigurationError(f"the query has {len(query):,} bytes; at most {LONGEST_QUERY} are read")
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=16
        )
    except ValueError:  # no UTF-8, no "=", or too many
        raise ConfigurationError("the query cannot be read; it needs to be NAME=VALUE&NAME=VALUE, in UTF-8") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"the parameter {twice[:40]!r} is there more than once; it needs to be there once")
    return found
