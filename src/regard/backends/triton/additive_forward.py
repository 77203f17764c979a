"""Additive attention forward: a program for each tile of rows of a head, which goes over the tiles of keys.

The scores of a pair take as long as its products with values times the number of features: so values that are NaN or
infinite are looked for in each tile of which some pairs do not exist, and reach the rows that attend to them alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .additive_scores import pair_scores, settled
from .score_tile import INF, LN2


@triton.jit
def _weighted(acc, p, v, keep, PRECISION: tl.constexpr, CUT: tl.constexpr):
    """acc + p v, where NaN and infinity in v reach the rows that attend to them, and no others."""
    if CUT:
        bad = score_tile.not_finite(v)
        if tl.max(tl.max(bad.to(tl.int32), 1), 0) != 0:
            met = score_tile.product(keep.to(tl.float16), bad.to(tl.float16), None, PRECISION)
            acc = tl.where(met > 0.0, float("nan"), acc)
        v = tl.where(bad, 0.0, v).to(v.dtype)
    return score_tile.product(p.to(v.dtype), v, acc, PRECISION)


@triton.jit
def _attend(
    acc,
    top,
    total,
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    head,
    key_head,
    s,
    values,
    m0,
    n0,
    begin,
    end,
    row_hash,
    M,
    N,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running output, maximum and sum of rows from m0 on after the keys from n0 on."""
    m, n = (m0 + tl.arange(0, BM))[:, None], (n0 + tl.arange(0, BN))[None, :]
    raw = pair_scores(QUERIES, KEYS, WEIGHT, head, key_head, h, m0, n0, BM, BN)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    x, _ = score_tile.scores(raw, None, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
    now = settled(tl.maximum(top, tl.max(x, 1)))
    shift = tl.where(now == -INF, 0.0, now)
    p, rescale = tl.exp2(x - shift[:, None]), tl.exp2(top - shift)
    total = total * rescale + tl.sum(p, 1)
    if DROPOUT.rows is not None:
        column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
        p = tl.where(score_tile.dropped(row_hash, column_hash, DROPOUT.threshold), 0.0, p)
    v = score_tile.load_rows(values, n0, N, V.row, DV, BDV, BN)
    keep = keep & (m < M)
    return _weighted(acc * rescale[:, None], settled(p), v, keep, PRECISION, CUT), now, total


@triton.jit
def additive_forward(
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    OUTPUT,
    LSE,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    M,
    N,
    heads,
    group,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of a tile of rows. Programs are numbered as those of `flash_forward`, last tiles first."""
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    key_head = b * (heads // group) + h // group
    s, m0 = score_tile.mask_set(MASK, b, h), tile * BM
    rows = m0 + tl.arange(0, BM)
    m = rows[:, None]
    values = score_tile.head_rows(V, b, h // group)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    top, total = tl.full([BM], -INF, tl.float32), tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    for i in tl.range(full, cut, num_stages=1):
        n0 = score_tile.full_tile(MASK, i) * BN
        acc, top, total = _attend(
            *(acc, top, total, QUERIES, KEYS, WEIGHT, V, SCORE, MASK, BIAS, DROPOUT, b, h, head, key_head, s, values),
            *(m0, n0, begin, end, row_hash, M, N, DV, BDV, BM, BN, False, PRECISION),
        )
    for i in tl.range(0, full - first + last - cut, num_stages=1):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        acc, top, total = _attend(
            *(acc, top, total, QUERIES, KEYS, WEIGHT, V, SCORE, MASK, BIAS, DROPOUT, b, h, head, key_head, s, values),
            *(m0, n0, begin, end, row_hash, M, N, DV, BDV, BM, BN, True, PRECISION),
        )
    some = total != 0.0
    share = tl.where(some, 1.0 / (tl.where(some, total, 1.0) * DROPOUT.keep), 0.0)
    lse = tl.where(some, (top + tl.log2(total)) * LN2, -INF)
    tl.store(score_tile.head_rows(LSE, b, h) + rows.to(tl.int64) * LSE.row, lse, mask=rows < M)
    number = tl.arange(0, BDV)[None, :]
    at = score_tile.head_rows(OUTPUT, b, h) + m.to(tl.int64) * OUTPUT.row + number
    tl.store(at, (acc * share[:, None]).to(OUTPUT.pointer.dtype.element_ty), mask=(m < M) & (number < DV))
