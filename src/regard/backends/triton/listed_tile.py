"""What the kernels over listed keys share: the rows of a list, and the scores of a tile of its keys.

A program has some rows that share a list, queries of a block times the heads of a group. It reads the keys that the
list names where they are, so that a tile of keys is not one of neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .score_tile import INF, LOG2E


@triton.jit
def listed_rows(LISTS, M, heads, BR: tl.constexpr):
    """Of a program: its batch, its number among the lists, the heads and queries of its rows, and which rows exist.

    Programs are numbered by batch, head with lists, list, piece of its rows, the last queries first.
    """
    program, group = tl.program_id(0), heads // LISTS.heads
    rows = group * LISTS.rows
    pieces = tl.cdiv(rows, BR)
    r, unit = program % pieces * BR + tl.arange(0, BR), program // pieces
    of_list, head = LISTS.lists - 1 - unit % LISTS.lists, unit // LISTS.lists
    b, list_head = (head // LISTS.heads).to(tl.int64), head % LISTS.heads
    h, m = list_head * group + r // LISTS.rows, of_list * LISTS.rows + r % LISTS.rows
    return b, list_head, of_list, h, m, (r < rows) & (m < M)


@triton.jit
def list_start(LISTS, b, list_head, of_list):
    """Where the list of a program begins."""
    entries = tl.cast(LISTS.length // LISTS.columns, tl.int64)
    return LISTS.indices + b * LISTS.batch + tl.cast(list_head, tl.int64) * LISTS.head + of_list * entries


@triton.jit
def listed_keys(LISTS, LIST, j, N):
    """The numbers, int64, of the keys that are at places j of a list; and whether these exist."""
    entry = tl.load(LIST + j // LISTS.columns, mask=j < LISTS.length, other=-1).to(tl.int64)
    n = entry * LISTS.columns + (j % LISTS.columns - LISTS.first)
    return n, (j < LISTS.length) & (entry >= 0) & (n >= 0) & (n < N)


@triton.jit
def row_places(ROWS, b, h, m):
    """Where rows m of heads h of `StridedRows` begin, (BR,)."""
    return ROWS.pointer + b * ROWS.batch + h.to(tl.int64) * ROWS.head + m.to(tl.int64) * ROWS.row


@triton.jit
def load_at(places, exist, D: tl.constexpr, BD: tl.constexpr):
    """Rows of D numbers that begin at these places, as a tile (·, BD); 0 where none exists."""
    number = tl.arange(0, BD)
    if D == BD:
        return tl.load(places[:, None] + number[None, :], mask=exist[:, None], other=0.0)
    else:
        return tl.load(places[:, None] + number[None, :], mask=exist[:, None] & (number < D)[None, :], other=0.0)


@triton.jit
def list_spans(LISTS, b, m, exist):
    """The first keys of rows m, and those after the last; nothing of use where rows are no spans."""
    if LISTS.spans is not None:
        at = LISTS.spans + b * LISTS.spans_batch + m.to(tl.int64) * 2
        return tl.load(at, mask=exist, other=0), tl.load(at + 1, mask=exist, other=0)
    else:
        return m, m


@triton.jit
def row_terms_at(TERMS, b, h, m, j, exist, length):
    """Numbers of rows and places j of their lists, from `StridedRows` (B, H, M, length); 0 beyond both ends."""
    at = row_places(TERMS, b, h, m)[:, None] + j[None, :]
    return tl.load(at, mask=exist[:, None] & (j < length)[None, :], other=0.0).to(tl.float32)


@triton.jit
def listed_scores(raw, LESS, ADDED, SCORE, BIAS, LISTS, b, h, m, j, n, exist, listed, begin, end):
    """The scores of a tile, less a number of each row, -inf where there is no pair; the slope, and which pairs exist.

    BIAS: one without numbers, as `score_tile.scores` wants it. ADDED: what is added, -inf where there is no pair.
    """
    keep = exist[:, None] & listed[None, :]
    if LISTS.spans is not None:
        keep = keep & (n[None, :] >= begin[:, None]) & (n[None, :] < end[:, None])
    if ADDED.pointer is not None:
        more = row_terms_at(ADDED, b, h, m, j, exist, LISTS.length)
        keep = keep & (more != -INF)
        x, slope = score_tile.scores(raw, None, SCORE, BIAS, 0, 0, 0, 0, keep, 0, 0, False)  # pyright: ignore[reportGeneralTypeIssues]
        x += more * LOG2E
        if LESS is not None:
            x -= LESS
    else:
        x, slope = score_tile.scores(raw, LESS, SCORE, BIAS, 0, 0, 0, 0, keep, 0, 0, False)  # pyright: ignore[reportGeneralTypeIssues]
    return tl.where(keep, x, -INF), slope, keep
