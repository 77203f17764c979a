"""The threshold of each row of sparsemax and entmax.

Of y = max((α - 1) s - τ, 0) over the keys of a row, the weights y^p, p = 1 / (α - 1), sum to 1 where the norm ‖y‖_p is
1. The norm is convex in τ, so Newton's method from max((α - 1) s) - 1, where it is at least 1, never goes past the
threshold. Each step is a sweep over the row's tiles, which computes their scores again; a program ends with the step
that moves none of its rows. Over 4,096 keys entmax-1.5 takes 5 to 8 sweeps, and sparsemax 5 to 12.

Other α up to 2 take as many. Above, the norm is not convex: steps stay within a bracket, which is halved where they do
not, and there may be 50 of them.

Source: Peters et al. 2019 (arXiv 1905.05702). That the norm is what Newton's method goes down, where weights are
squares, is ours: it takes larger steps than their sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .score_tile import INF

MOST_SWEEPS = tl.constexpr(64)
SMALLEST_STEP, SMALLEST_STEP_OF_SQUARES = tl.constexpr(2.0**-22), tl.constexpr(2.0**-17)
SMALLEST_STEP_OF_POWERS = tl.constexpr(2.0**-20)
"""A smaller step is the last: that of a sum is exact but for the keys that it passes, that of a norm to its square; of
other powers than 1 and 2 as a share of a threshold above 1."""
NEAR_ONE = tl.constexpr(2.0**-10)
"""How far from 1 the sum of a row with α above 2 is at most, when a small step is the last."""
MARGIN = tl.constexpr(2.0**-22)
"""How far below the largest score a threshold stays at least, as a share of it: they are not one number of float32."""


@triton.jit
def _tile_numbers(
    one,
    two,
    q,
    threshold,
    keys,
    K,
    SCORE,
    MASK,
    BIAS,
    b,
    h,
    s,
    m,
    n0,
    begin,
    end,
    M,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running numbers of `_sweep` after a tile."""
    k = score_tile.load_rows(keys, n0, N, K.row, D, BD, BN)
    n = (n0 + tl.arange(0, BN))[None, :]
    raw = score_tile.product(q, tl.trans(k), None, PRECISION)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    if threshold is None:
        x, _ = score_tile.scores(raw, None, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
        spoiled = raw - raw
        if CUT:
            spoiled = tl.where(keep, spoiled, 0.0)
        return tl.maximum(one, tl.max(x, 1)), two + tl.sum(spoiled, 1)
    else:
        x, _ = score_tile.scores(raw, threshold[:, None], SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
        above = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if SCORE.powers is not None:
            weight, slope = score_tile.excess_weights(x, SCORE, h)  # pyright: ignore[reportGeneralTypeIssues]
            return one + tl.sum(weight, 1), two + tl.sum(slope, 1)
        elif SCORE.squared is not None:
            return one + tl.sum(above * above, 1), two + tl.sum(above, 1)
        else:
            return one + tl.sum(above, 1), two + tl.sum(tl.where(x > 0.0, 1.0, 0.0), 1)


@triton.jit
def _sweep(
    q,
    threshold,
    keys,
    K,
    SCORE,
    MASK,
    BIAS,
    b,
    h,
    s,
    m,
    begin,
    end,
    tile,
    tiles,
    M,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Two numbers of each row, over x, its scores above the threshold: Σ x² and Σ x, or Σ x and their number.

    Of other powers than 1 and 2 Σ w and Σ w^(2 - α). Without a threshold the largest score, and NaN where a product is
    not finite, else 0.
    """
    one, two = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    if threshold is None:
        one -= INF
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    for i in range(full, cut):
        n0 = score_tile.full_tile(MASK, i) * BN
        one, two = _tile_numbers(
            *(one, two, q, threshold, keys, K, SCORE, MASK, BIAS, b, h, s, m, n0, begin, end, M, N, D, BD, BN),
            *(False, PRECISION),
        )
    for i in range(full - first + last - cut):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        one, two = _tile_numbers(
            *(one, two, q, threshold, keys, K, SCORE, MASK, BIAS, b, h, s, m, n0, begin, end, M, N, D, BD, BN),
            *(True, PRECISION),
        )
    return one, two


@triton.jit
def _newton_step(one, two, SCORE, h):
    """The step from a threshold of which these are the numbers of `_sweep`, in the units of scores; NaN stays."""
    some = two != 0.0
    slope = tl.where(some, two, 1.0) * score_tile.excess_of(SCORE, h)
    if SCORE.powers is not None:
        share = 1.0 - tl.load(SCORE.powers + h)
        step = (one - tl.exp2(tl.log2(tl.where(one > 0.0, one, 1.0)) * share)) / slope
    elif SCORE.squared is not None:
        norm = tl.sqrt(one) * SCORE.excess
        step = norm * (norm - 1.0) / (slope * SCORE.excess)
    else:
        step = (one * SCORE.excess - 1.0) / slope
    return tl.where(some, step, 0.0)


@triton.jit
def last_step(threshold):
    """The largest step that is the last, of other powers than 1 and 2."""
    return tl.maximum(tl.abs(threshold), 1.0) * SMALLEST_STEP_OF_POWERS


@triton.jit
def _bracketed_step(threshold, step, one, two, low, high, power):
    """A threshold after a step within its bracket, or else in the middle of that; the bracket; and which rows moved.

    Above α = 2 two steps may go to and fro, so that none is trusted beyond the middle; and a key that is hardly above
    the threshold makes a step small, however far the sum is from 1.
    """
    low, high = tl.where(one >= 1.0, threshold, low), tl.where(one <= 1.0, threshold, high)
    most, near = tl.where(power <= 1.0, INF, 0.5 * (high - low)), tl.where(power <= 1.0, INF, NEAR_ONE)
    enough, stepped = last_step(threshold), threshold + step
    inside = (two != 0.0) & (stepped >= low) & (stepped <= high) & (tl.abs(step) <= most)
    inside = inside & ((tl.abs(step) > enough) | (tl.abs(one - 1.0) <= near))
    stepped = tl.where(inside, stepped, 0.5 * (low + high))
    return stepped, low, high, tl.abs(stepped - threshold) > enough


@triton.jit
def row_thresholds(
    Q,
    K,
    THRESHOLDS,
    SCORE,
    MASK,
    BIAS,
    M,
    N,
    heads,
    group,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write τ of each row, of scores times α - 1: -inf without keys, NaN where a product is not finite.

    THRESHOLDS: `StridedRows`. Programs as of `flash_forward`.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    s, m0 = score_tile.mask_set(MASK, b, h), tile * BM
    rows = m0 + tl.arange(0, BM)
    m = rows[:, None]
    q = score_tile.load_rows(score_tile.head_rows(Q, b, h), m0, M, Q.row, D, BD, BM)
    keys = score_tile.head_rows(K, b, h // group)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    top, spoiled = _sweep(
        *(q, None, keys, K, SCORE, MASK, BIAS, b, h, s, m, begin, end, tile, tiles, M, N, D, BD, BM, BN, PRECISION),
    )
    empty, excess = top == -INF, score_tile.excess_of(SCORE, h)
    threshold = tl.where(empty, 0.0, top - 1.0 / excess) + spoiled
    low, high = threshold, tl.where(empty, 0.0, top) + spoiled
    smallest = SMALLEST_STEP_OF_SQUARES if SCORE.squared is not None else SMALLEST_STEP
    left = tl.full([], MOST_SWEEPS, tl.int32)
    while left > 0:
        one, two = _sweep(
            *(q, threshold, keys, K, SCORE, MASK, BIAS, b, h, s, m, begin, end, tile, tiles, M, N),
            *(D, BD, BM, BN, PRECISION),
        )
        step = _newton_step(one, two, SCORE, h)  # pyright: ignore[reportGeneralTypeIssues]
        if SCORE.powers is not None:
            threshold, low, high, moved = _bracketed_step(
                *(threshold, step, one, two, low, high, tl.load(SCORE.powers + h)),
            )
        else:
            before = threshold
            threshold += step
            moved = (step > smallest) & (threshold > before)
        left = (left - 1) * tl.max(moved.to(tl.int32), 0)
    ceiling = top - tl.abs(top) * MARGIN
    threshold = tl.where(threshold > ceiling, ceiling, threshold)
    found = tl.where(empty, -INF, threshold * excess) + spoiled
    at = score_tile.head_rows(THRESHOLDS, b, h) + rows.to(tl.int64) * THRESHOLDS.row
    tl.store(at, found, mask=rows < M)
