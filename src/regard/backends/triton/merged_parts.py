"""Few queries over one part of the keys, and the output of all parts: the kernels of `split_keys`.

A program has the rows of a key head, padded for tensor cores, and one part of its keys. What it writes of them is not
divided yet by the sum of weights, so that parts are merged by their largest scores, which are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .score_tile import INF, LN2, LOG2E, head_rows, load_rows, load_split_rows, not_finite, product, split_product

BEYOND = tl.constexpr(2**31 - 1)
"""The place of what is no key: no row attends to it."""


@triton.jit
def key_places(TILES, first, N, BN: tl.constexpr):
    """Of the tile of keys at place `first`: its first row in memory, the row after its last, and its keys' places.

    TILES: (tiles, 3) int32, of each tile its first row, its keys, and the place of the first among those that rows
    attend to; None where places are rows.
    """
    i = tl.arange(0, BN)
    if TILES is not None:
        at = TILES + first // BN * 3
        row, count, place = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        return row, row + count, tl.where(i < count, place + i, BEYOND)[None, :]
    else:
        return first, N, (first + i)[None, :]


@triton.jit
def added_numbers(added, n, column, kept):
    """What is added to the scores of keys n, float32; -inf where a pair is not kept."""
    return tl.load(added + tl.cast(n, tl.int64) * column, mask=kept, other=-INF).to(tl.float32)


@triton.jit
def spoiled(
    sums,
    values,
    added,
    TILES,
    limit,
    start,
    stop,
    N,
    value_row,
    added_column,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The sums, NaN where a row attends to a key whose value is NaN or infinite there."""
    for first in tl.range(start, stop, BN, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        row, end, n = key_places(TILES, first, N, BN)  # pyright: ignore[reportGeneralTypeIssues]
        kept = n < limit[:, None]
        if added is not None:
            kept = kept & (added_numbers(added, n, added_column, kept) != -INF)
        bad = not_finite(load_rows(values, row, end, value_row, DV, BDV, BN))
        met = product(kept.to(tl.float16), bad.to(tl.float16), None, PRECISION)
        sums = tl.where(met > 0.0, float("nan"), sums)
    return sums


@triton.jit
def over_keys(
    query,
    keys,
    values,
    added,
    TILES,
    limit,
    start,
    stop,
    N,
    key_row,
    value_row,
    added_column,
    factor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    REST: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of some keys: each row's largest score, in units of log₂ e, its sum of weights and of weighted values.

    query: split rows. keys, values: pointers to the first row of the head; without one, values are the first DV numbers
    of keys, which are then read once. added: pointers (BR, 1) to rows of what is added, or None.
    REPAIR: NaN and infinity in values count as 0.
    """
    top, total = tl.full([BR], -INF, tl.float32), tl.zeros([BR], tl.float32)
    sums = tl.zeros([BR, BDV], tl.float32)
    for first in tl.range(start, stop, BN, num_stages=STAGES):
        row, end, n = key_places(TILES, first, N, BN)  # pyright: ignore[reportGeneralTypeIssues]
        kept = n < limit[:, None]
        key = load_split_rows(keys, row, end, key_row, D, BD, REST, BN)
        x = split_product(query, key, PRECISION) * factor
        if added is not None:
            more = added_numbers(added, n, added_column, kept)
            x += more * LOG2E
            kept = kept & (more != -INF)
        x = tl.where(kept, x, -INF)
        now = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(now == -INF, 0.0, now)
        weight, share = tl.exp2(x - shift[:, None]), tl.exp2(top - shift)
        value = key[0]  # pyright: ignore[reportIndexIssue]
        if values is not None:
            value = load_rows(values, row, end, value_row, DV, BDV, BN)
        sums = sums * share[:, None]
        if REPAIR:
            value = tl.where(not_finite(value), 0.0, value).to(value.dtype)
        sums = product(weight.to(value.dtype), value, sums, PRECISION)
        total, top = total * share + tl.sum(weight, 1), now
    return top, total, sums


@triton.jit
def attend_keys(
    query,
    keys,
    values,
    added,
    TILES,
    limit,
    start,
    stop,
    N,
    key_row,
    value_row,
    added_column,
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
    """`over_keys`, where NaN and infinity in values reach the rows that attend to them, and no others.

    MASKED: whether some rows attend to fewer keys than others.
    """
    top, total, sums = over_keys(  # pyright: ignore[reportGeneralTypeIssues]
        *(query, keys, values, added, TILES, limit, start, stop, N, key_row, value_row, added_column, factor),
        *(D, DV, BD, BDV, REST, BR, BN, False, STAGES, PRECISION),
    )
    if MASKED:  # noqa: SIM102  # it is known to the compiler, what follows is not
        if tl.max(not_finite(sums).to(tl.int32).reshape(BR * BDV), 0) != 0:
            top, total, sums = over_keys(
                *(query, keys, values, added, TILES, limit, start, stop, N, key_row, value_row, added_column, factor),
                *(D, DV, BD, BDV, REST, BR, BN, True, REPAIR_STAGES, PRECISION),
            )
            sums = spoiled(
                *(sums, keys if values is None else values, added, TILES, limit, start, stop, N),
                *(key_row if values is None else value_row, added_column, DV, BDV, BN, PRECISION),
            )
    return top, total, sums


@triton.jit(do_not_specialize=["heads", "blocks", "R", "N", "parts", "queries", "least", "ahead"])
def attend_part(
    Q,
    K,
    V,
    ADDED,
    added_column,
    PARTS,
    OUTPUT,
    LSE,
    heads,
    blocks,
    R,
    N,
    parts,
    queries,
    least,
    ahead,
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
    """One part of the keys, for a block of rows of a key head: program (batch, head, block) and part.

    Q, K, V, ADDED: `StridedRows`; V without a tensor where values are the first DV numbers of keys. Row r attends to
    keys below least + max(r mod queries - ahead, 0). PARTS: the sums of weighted values (B, Hk, R, parts, DV), the
    largest scores and the sums of weights, (B, Hk, R, parts) each; None where there is one part, which is written as it
    will be. MASKED: whether rows attend to fewer than all N keys.
    """
    unit, part = tl.program_id(0), tl.program_id(1)
    head, block = unit // blocks, unit % blocks
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    r, number = block * BR + tl.arange(0, BR), tl.arange(0, BDV)
    tiles = tl.cdiv(N, BN)
    each, rest = tiles // parts, tiles % parts
    start = part * each + tl.minimum(part, rest)
    stop = start + each + (part < rest).to(tl.int32)
    limit = tl.where(r < R, tl.minimum(least + tl.maximum(r % queries - ahead, 0), N), 0)
    query = load_split_rows(head_rows(Q, b, h), block * BR, R, Q.row, D, BD, REST, BR)
    keys, values, added = head_rows(K, b, h), None, None
    if V.pointer is not None:
        values = head_rows(V, b, h)
    if ADDED.pointer is not None:
        added = head_rows(ADDED, b, h) + r.to(tl.int64)[:, None] * ADDED.row
    top, total, sums = attend_keys(  # pyright: ignore[reportGeneralTypeIssues]
        *(query, keys, values, added, None, limit, start * BN, stop * BN, N, K.row, V.row, added_column, factor),
        *(D, DV, BD, BDV, REST, BR, BN, MASKED, STAGES, REPAIR_STAGES, PRECISION),
    )
    at, exists = head.to(tl.int64) * R + r, r < R
    written = exists[:, None] & (number < DV)[None, :]
    if PARTS is None:
        sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(OUTPUT + at[:, None] * DV + number[None, :], sums.to(OUTPUT.dtype.element_ty), mask=written)
        if LSE is not None:
            tl.store(LSE + at, (top + tl.log2(total)) * LN2, mask=exists)
    else:
        count = (tl.num_programs(0) // blocks).to(tl.int64) * R * parts
        at = at * parts + part
        tl.store(PARTS + at[:, None] * DV + number[None, :], sums, mask=written)
        tl.store(PARTS + count * DV + at, top, mask=exists)
        tl.store(PARTS + count * (DV + 1) + at, total, mask=exists)


@triton.jit
def merged(PARTS, first, parts, count, DV: tl.constexpr, BDV: tl.constexpr, BP: tl.constexpr):
    """The largest score of a row, its sum of weights and its output, from `parts` sums of PARTS from `first` on.

    count: the sums of all rows.
    """
    number = tl.arange(0, BDV)
    top, total = tl.full([1], -INF, tl.float32), tl.zeros([1], tl.float32)
    sums = tl.zeros([BDV], tl.float32)
    for begin in range(0, parts, BP):
        part = begin + tl.arange(0, BP)
        at, exists = first + part, part < parts
        tops = tl.load(PARTS + count * DV + at, mask=exists, other=-INF)
        totals = tl.load(PARTS + count * (DV + 1) + at, mask=exists, other=0.0)
        there = exists[:, None] & (number < DV)[None, :]
        values = tl.load(PARTS + at[:, None] * DV + number[None, :], mask=there, other=0.0)
        now = tl.maximum(top, tl.max(tops, 0))
        shift = tl.where(now == -INF, 0.0, now)
        before, share = tl.exp2(top - shift), tl.exp2(tops - shift)
        total = total * before + tl.sum(totals * share, 0)
        sums = sums * before + tl.sum(values * share[:, None], 0)
        top = now
    return top, total, sums / tl.where(total == 0.0, 1.0, total)


@triton.jit(do_not_specialize=["parts"])
def merge_parts(PARTS, OUTPUT, LSE, parts, DV: tl.constexpr, BDV: tl.constexpr, BP: tl.constexpr):
    """Output and log-sum-exp of a row from the sums of its parts, see `attend_part`: program (batch, head, row)."""
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, BDV)
    count = tl.num_programs(0).to(tl.int64) * parts
    top, total, output = merged(PARTS, row * parts, parts, count, DV, BDV, BP)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(OUTPUT + row * DV + number, output.to(OUTPUT.dtype.element_ty), mask=number < DV)
    if LSE is not None:
        tl.store(LSE + row + tl.arange(0, 1), (top + tl.log2(total)) * LN2)
