"""Which single weights a static page holds of long maps: those around what its state shows, first of all."""

from __future__ import annotations

from collections.abc import Iterator

from .api import MAX_TILE_SIDE
from .atlas import Atlas, AttentionMap
from .view_state import ViewState, kept_tokens

AROUND = MAX_TILE_SIDE // 2
"""Rows and columns on each side of a kept pair whose weights are written."""
MOST_SPAN = 1024
"""Of a wider frame only the middle is written."""

Tile = tuple[int, int, int, int]
"""Map, head, and the row and column of a tile, counted in tiles."""


def tiles_in_sight(atlas: Atlas, state: ViewState) -> Iterator[Tile]:
    """The tiles around what is kept, in the frame and in the window: of the shown head, then of the pinned ones.

    Then those around what is kept of all other heads of the same text, so that heads can be put in order by it.
    """
    shown = int(state.map), state.head
    of = atlas.maps[shown[0]]
    kept = list(_around(_kept_pairs(of, state)))
    sight = [*kept, *_around_frame(of, state), *_around_window(of, state)]
    alike = [number for number, other in enumerate(atlas.maps) if _same_text(other, of)]
    pinned = [pin for pin in state.pins if pin[0] in alike]
    others = [(number, head) for number in alike for head in range(atlas.maps[number].heads)]
    for heads, places in (([shown, *pinned], sight), (others, kept)):
        for number, head in heads:
            yield from ((number, head, *tile) for tile in _tiles(atlas.maps[number], places))


Place = tuple[float, float, float, float]
"""First row, last row, first column, last column."""


def _kept_pairs(of: AttentionMap, state: ViewState) -> Iterator[tuple[int, int]]:
    """The pairs that are kept; a token without a partner as the pair on the diagonal."""
    queries, keys = (kept_tokens(side) for side in state.at or (None, None))
    for query in queries or keys:
        for key in keys or (query,):
            if query < of.queries and key < of.keys:
                yield query, key


def _around(pairs: Iterator[tuple[int, int]]) -> Iterator[Place]:
    for query, key in pairs:
        yield query, query, key, key  # its own tile first
        yield query - AROUND, query + AROUND, key - AROUND, key + AROUND


def _around_frame(of: AttentionMap, state: ViewState) -> Iterator[Place]:
    if state.frame is not None:
        row, column, span = state.frame
        half = min(span, MOST_SPAN / 2)  # twice the span, which is of the shorter side of the view
        yield row - half, row + half, column - half, column + half


def _around_window(of: AttentionMap, state: ViewState) -> Iterator[Place]:
    """The rows and columns that lines and text show."""
    if state.view in ("lines", "text"):
        row, column = state.window
        yield row, row + AROUND, column, column + AROUND


def _tiles(of: AttentionMap, places: list[Place]) -> Iterator[tuple[int, int]]:
    """The tiles of a map that places touch, each once."""
    found = {
        (row, column): None
        for top, bottom, left, right in places
        for row in _touched(top, bottom, of.queries)
        for column in _touched(left, right, of.keys)
    }
    yield from found


def _touched(start: float, end: float, count: int) -> range:
    """The tiles of one side, of so many rows or columns, between two places."""
    first = int(min(max(start, 0), count - 1)) // MAX_TILE_SIDE
    return range(first, int(min(max(end, 0), count - 1)) // MAX_TILE_SIDE + 1)


def _same_text(one: AttentionMap, other: AttentionMap) -> bool:
    return (
        (one.kind, one.queries, one.keys, one.sequence) == (other.kind, other.queries, other.keys, other.sequence)
        and one.query_tokens == other.query_tokens
        and one.key_tokens == other.key_tokens
    )
