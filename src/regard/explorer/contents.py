"""What of an atlas goes into a static page: whole weights of short maps, cells of long ones, as much as there is room.

The keys are those that `explorer/src/sources/embedded.ts` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import AtlasError
from .answers import PROFILES, TILE, Answers, Floats, shortened, shown_weights
from .atlas import Atlas, AttentionMap
from .written import DIGITS, written

LEAST_BYTES = 0.3
"""Bytes that a weight takes in a page, however well it is compressed: what would be too much is not tried."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How much is written: whole weights of maps with at most `whole` rows and columns, else cells, at most side²."""

    whole: int
    side: int

    def takes_whole(self, of: AttentionMap) -> bool:
        """Whether the weights of a map are written as they are."""
        return max(of.queries, of.keys) <= self.whole

    def levels(self, of: AttentionMap) -> list[int]:
        """The levels of the pyramid that are written; none where one tile of weights is all that there is."""
        if self.takes_whole(of):
            return [] if max(of.queries, of.keys) <= TILE else [len(of.levels) - 1]
        return [level for level, shape in enumerate(of.levels) if max(shape) <= self.side]


DEPTHS = Depth(512, 1024), Depth(512, 512), Depth(256, 256), Depth(128, 128), Depth(64, 64), Depth(0, 64)
"""What is tried, one after the other, until it fits; the coarsest level always is in."""


class TooMuch(Exception):
    """There is no room for all of it."""


@dataclass(slots=True)
class Contents:
    """What a page has in it, and how many bytes that takes."""

    most: int
    held: dict[str, Any]
    size: int = 0
    whole: int = 0
    cells: set[tuple[int, int]] = field(default_factory=set)

    def add(self, part: str, key: str, values: Floats) -> None:
        """Write one array."""
        text = written(values)
        self.held[part][key] = text
        self.size += len(text["data"]) + len(key) + 60
        if self.size > self.most:
            raise TooMuch

    def said(self) -> str:
        """What it is, in words."""
        others = len(self.held["meta"]["maps"]) - self.whole
        parts = []
        if self.whole:
            parts.append(f"whole weights of {_maps(self.whole)}, to within {2.0**-DIGITS:.1%} of each")
        if others:
            finest = " and ".join(f"{rows} × {columns}" for rows, columns in sorted(self.cells))
            parts.append(f"{_maps(others)} in cells of {finest} weights and more")
        return "; ".join(parts)


def contents_of(atlas: Atlas, most: int) -> Contents:
    """As much of an atlas as fits into so many bytes.

    Raises:
        AtlasError: not even the least fits; there is no map in the atlas.
    """
    meta = Answers(atlas).meta()
    del meta["overview"]
    for depth in DEPTHS:
        weights = sum(of.heads * of.queries * of.keys for of in atlas.maps if depth.takes_whole(of))
        if weights * LEAST_BYTES > most:
            continue
        held: dict[str, Any] = {"meta": meta, "tokens": [], "pooled": {}, "tiles": {}, "profiles": {}}
        contents = Contents(most, held)
        try:
            for number, of in enumerate(atlas.maps):
                _write(contents, depth, number, of)
        except TooMuch:
            continue
        return contents
    heads = sum(of.heads for of in atlas.maps)
    raise AtlasError(
        f"the atlas has {len(atlas.maps)} maps with {heads} heads in all, and even their overviews take more than "
        f"{most / 1e6:,.0f} MB in a page: record fewer layers or shorter texts, or serve it with `regard explore ATLAS`"
    )


def _write(contents: Contents, depth: Depth, number: int, of: AttentionMap) -> None:
    contents.held["tokens"].append(_tokens(contents, of))
    levels = depth.levels(of)
    if depth.takes_whole(of):
        contents.whole += 1
    else:
        contents.cells.add(of.cell(levels[0]))
    for head in range(of.heads):
        for level in levels:
            for reduce in ("max", "mean"):
                contents.add("pooled", f"{number}/{head}/{level}/{reduce}", of.pooled(head, level, reduce))
        if depth.takes_whole(of):
            for row, column, rows, columns in _tiles(of):
                contents.add("tiles", f"{number}/{head}/{row}/{column}", shown_weights(of, head, rows, columns))
        for which in PROFILES:
            values = of.entropy(head) if which == "entropy" else of.received(head)
            contents.add("profiles", f"{number}/{head}/{which}", values)


def _tiles(of: AttentionMap) -> Iterator[tuple[int, int, slice, slice]]:
    for row in range(-(-of.queries // TILE)):
        for column in range(-(-of.keys // TILE)):
            rows = slice(row * TILE, min((row + 1) * TILE, of.queries))
            yield row, column, rows, slice(column * TILE, min((column + 1) * TILE, of.keys))


def _tokens(contents: Contents, of: AttentionMap) -> dict[str, list[str]]:
    """The tokens of a map; those of the keys are left out where they are those of the queries."""
    tokens = {"query": [shortened(word) for word in of.query_tokens]}
    if of.key_tokens != of.query_tokens:
        tokens["key"] = [shortened(word) for word in of.key_tokens]
    contents.size += sum(len(word.encode()) + 3 for words in tokens.values() for word in words)
    if contents.size > contents.most:
        raise TooMuch
    return tokens


def _maps(count: int) -> str:
    return "1 map" if count == 1 else f"{count} maps"
