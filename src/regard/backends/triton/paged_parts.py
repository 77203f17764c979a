"""A few tokens of each of many sequences over keys in pages: the kernels of `paged_tiles`.

A program has the rows of a group, its tokens times the query heads of a key head, and some tiles of the group's keys,
which a table finds in memory. Parts are written and merged as `merged_parts` does it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .listed_tile import load_at
from .merged_parts import attend_keys, merged
from .score_tile import LN2

UNIT_NUMBERS, SPAN_NUMBERS = tl.constexpr(8), tl.constexpr(3)


@triton.jit(do_not_specialize=["group", "count"])
def attend_pages(
    Q,
    K,
    V,
    TILES,
    UNITS,
    PARTS,
    group,
    count,
    factor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    REST: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    REPAIR_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One part of the keys of a group of tokens, for a block of the rows of a key head: program (unit, head, block).

    Q (H, T, D), K and V (Hk, N, ·): `StridedRows` without batch. UNITS: (units, 8) int32, of each the group's first
    token and its number of tokens, the keys that the first attends to, the first tile and the one after the last, and
    where its sums are: the group's first one of a head, the part, the parts. PARTS: as of `attend_part`, with `count`
    sums of each key head. group: query heads of a key head.
    """
    unit, h, block = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    at = UNITS + unit * UNIT_NUMBERS
    token, tokens, limit = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    start, stop, base = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    part, parts = tl.load(at + 6), tl.load(at + 7)
    r, number = block * BR + tl.arange(0, BR), tl.arange(0, BDV)
    exists = r < tokens * group
    limits = tl.where(exists, limit + r % tokens, 0)
    rows = Q.pointer + (h * group + r // tokens) * Q.head + (token + r % tokens).to(tl.int64) * Q.row
    query = load_at(rows, exists, D if REST == 0 else BD, BD), None
    if REST > 0:
        query = query[0], load_at(rows + BD, exists, D - BD, REST)
    top, total, sums = attend_keys(  # pyright: ignore[reportGeneralTypeIssues]
        *(query, K.pointer + h * K.head, V.pointer + h * V.head, None, TILES, limits, start * BN, stop * BN, 0),
        *(K.row, V.row, 0, factor, D, DV, BD, BDV, REST, BR, BN, MASKED, STAGES, REPAIR_STAGES, PRECISION),
    )
    place, every = h * count + base + r * parts + part, tl.num_programs(1) * tl.cast(count, tl.int64)
    tl.store(PARTS + place[:, None] * DV + number[None, :], sums, mask=exists[:, None] & (number < DV)[None, :])
    tl.store(PARTS + every * DV + place, top, mask=exists)
    tl.store(PARTS + every * (DV + 1) + place, total, mask=exists)


@triton.jit(do_not_specialize=["group", "count"])
def merge_pages(PARTS, SPANS, OUTPUT, LSE, group, count, DV: tl.constexpr, BDV: tl.constexpr, BP: tl.constexpr):
    """Output (H, T, DV) and log-sum-exp (H, T) of a token from the sums of its parts: program (token, head).

    SPANS: (T, 3) int32, of each token its first sum of a key head, the sums from one query head to the next, and its
    parts: none of a token in no group.
    """
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at, number = SPANS + token * SPAN_NUMBERS, tl.arange(0, BDV)
    first = head // group * count + tl.load(at) + head % group * tl.load(at + 1)
    every = tl.num_programs(1) // group * tl.cast(count, tl.int64)
    parts = tl.load(at + 2)
    top, total, output = merged(PARTS, first, parts, every, DV, BDV, BP)  # pyright: ignore[reportGeneralTypeIssues]
    row = head * tl.num_programs(0) + token
    tl.store(OUTPUT + row * DV + number, output, mask=number < DV)
    tl.store(LSE + row + tl.arange(0, 1), (top + tl.log2(total)) * LN2)
