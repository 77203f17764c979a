"""The k largest of each row of exponents that come tile by tile, kept in slots in no order until they are stored.

Most tiles have few numbers that are larger than the least that a row keeps: these are taken out one after another, the
largest of each row at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .score_tile import INF

LEAST = tl.constexpr(-126.0)
"""The exponent up to which a weight counts as 0: exp2 of a smaller one is no normal float32."""


@triton.jit
def empty_slots(BM: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr):
    """Slots (BM, SLOTS) of exponents, K of them free, and the columns in them; SLOTS is a power of two."""
    slot = tl.arange(0, SLOTS)[None, :] + tl.zeros([BM, 1], tl.int32)
    return tl.where(slot < K, LEAST, INF), tl.zeros([BM, SLOTS], tl.int32)


@triton.jit
def first_place(values, value):
    """The first place of each row (BM, ·) that has the value of the row."""
    place = tl.arange(0, values.shape[1])[None, :]
    return tl.min(tl.where(values == value[:, None], place, values.shape[1]), 1)


@triton.jit
def insert_largest(top, top_columns, exponent, n0, K: tl.constexpr):
    """The slots after a tile (BM, BN) of exponents that begins at column n0."""
    slot, n = tl.arange(0, top.shape[1])[None, :], tl.arange(0, exponent.shape[1])[None, :]
    rounds = 1
    if K > 1:
        larger = tl.sum((exponent > tl.min(top, 1)[:, None]).to(tl.int32), 1)
        rounds = tl.minimum(tl.max(larger), K)  # not along axis 0: the compiler for sm_100 fails there
    for _ in range(rounds):
        largest, least = tl.max(exponent, 1), tl.min(top, 1)
        at = first_place(exponent, largest)
        taken = (slot == first_place(top, least)[:, None]) & (largest > least)[:, None]
        top = tl.where(taken, largest[:, None], top)
        top_columns = tl.where(taken, (n0 + at)[:, None], top_columns)
        exponent = tl.where(n == at[:, None], -INF, exponent)
    return top, top_columns


@triton.jit
def store_largest(LARGEST, top, top_columns, first, rows, K: tl.constexpr):
    """Store the weights of some rows in descending order, and their columns; the weight of a free slot is 0."""
    row, slot = tl.arange(0, top.shape[0]), tl.arange(0, top.shape[1])[None, :]
    top = tl.where(slot < K, top, -INF)
    for place in range(K):
        largest = tl.max(top, 1)
        here = slot == first_place(top, largest)[:, None]
        target = (first + row) * K + place
        tl.store(LARGEST.weights + target, tl.where(largest > LEAST, tl.exp2(largest), 0.0), mask=row < rows)
        column = tl.sum(tl.where(here, top_columns, 0), 1)
        tl.store(LARGEST.columns + target, column.to(tl.int64), mask=row < rows)
        top = tl.where(here, -INF, top)
