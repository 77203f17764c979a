"""What of an atlas goes into a static page: whole weights of short maps, cells of long ones, as much as there is room.

Where there is room for the whole weights of some heads alone, they are of those whose roles are clearest.

The keys are those that `explorer/src/sources/embedded.ts` reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import AtlasError
from .answers import TILE, Answers, Floats, profile_of, shortened, shown_weights
from .atlas import Atlas, AttentionMap
from .written import DIGITS, written

ALL = "regard explore ATLAS serves all"
"""Where a page that does not hold all weights says that they are."""
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
    heads: int = 0
    cells: set[tuple[int, int]] = field(default_factory=set)

    def add(self, part: str, key: str, values: Floats) -> None:
        """Write one array."""
        text = written(values)
        self.held[part][key] = text
        self.size += _size(key, text)
        if self.size > self.most:
            raise TooMuch

    def add_if_they_fit(self, part: str, arrays: dict[str, Floats]) -> bool:
        """Write all of some arrays, or none of them."""
        texts = {key: written(values) for key, values in arrays.items()}
        size = sum(_size(key, text) for key, text in texts.items())
        if self.size + size > self.most:
            return False
        self.held[part].update(texts)
        self.size += size
        return True

    def said(self) -> str:
        """What it is, in words."""
        others = len(self.held["meta"]["maps"]) - self.whole
        parts = []
        if self.whole:
            parts.append(f"whole weights of {_some(self.whole, 'map')}, to within {2.0**-DIGITS:.1%} of each")
        if others:
            finest = " and ".join(f"{rows} × {columns}" for rows, columns in sorted(self.cells))
            more = f", with whole weights of {_some(self.heads, 'head')} of them" if self.heads else ""
            parts.append(f"{_some(others, 'map')} in cells of {finest} weights and more{more}")
        return "; ".join(parts)


def contents_of(atlas: Atlas, most: int) -> Contents:
    """As much of an atlas as fits into so many bytes.

    Raises:
        AtlasError: not even the least fits; there is no map in the atlas.
    """
    meta = Answers(atlas).meta() | {"exact": f"weights to within {100 * 2.0**-DIGITS:.1f} %", "all": ALL}
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
        _fill(contents, depth, atlas)
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
            for key, values in _tiles(of, number, head):
                contents.add("tiles", key, values)
        for which in contents.held["meta"]["profiles"]:
            contents.add("profiles", f"{number}/{head}/{which}", profile_of(of, head, which))


def _fill(contents: Contents, depth: Depth, atlas: Atlas) -> None:
    """Add the whole weights of single heads while there is room, those whose roles are clearest first."""
    heads = [
        (-max((float(role["score"]) for role in of.roles[head]), default=0.0), number, head)
        for number, of in enumerate(atlas.maps)
        if not depth.takes_whole(of) and DEPTHS[0].takes_whole(of)
        for head in range(of.heads)
    ]
    for _, number, head in sorted(heads):
        if not contents.add_if_they_fit("tiles", dict(_tiles(atlas.maps[number], number, head))):
            return
        contents.heads += 1


def _tiles(of: AttentionMap, number: int, head: int) -> Iterator[tuple[str, Floats]]:
    for row in range(-(-of.queries // TILE)):
        for column in range(-(-of.keys // TILE)):
            rows = slice(row * TILE, min((row + 1) * TILE, of.queries))
            columns = slice(column * TILE, min((column + 1) * TILE, of.keys))
            yield f"{number}/{head}/{row}/{column}", shown_weights(of, head, rows, columns)


def _size(key: str, text: dict[str, Any]) -> int:
    return len(text["data"]) + len(key) + 60


def _tokens(contents: Contents, of: AttentionMap) -> dict[str, list[str]]:
    """The tokens of a map; those of the keys are left out where they are those of the queries."""
    tokens = {"query": [shortened(word) for word in of.query_tokens]}
    if of.key_tokens != of.query_tokens:
        tokens["key"] = [shortened(word) for word in of.key_tokens]
    contents.size += sum(len(word.encode()) + 3 for words in tokens.values() for word in words)
    if contents.size > contents.most:
        raise TooMuch
    return tokens


def _some(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"
