"""The gradient of the scores of a tile, in either orientation, and what it adds to that of a bias."""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .score_tile import INF


@triton.jit
def score_gradient(
    raw,
    grad_weight,
    high,
    rest,
    delta,
    row_hash,
    column_hash,
    SCORE,
    BIAS,
    DROPOUT,
    b,
    h,
    m,
    n,
    keep,
    M,
    N,
    CUT: tl.constexpr,
    REPAIR: tl.constexpr,
):
    """Of a tile of rows m and columns n, in either orientation: its weights, the gradient of its scores, and the slope.

    Weights are those after dropout. The gradient is that before the softcap, times the keep probability: the slope
    makes it that of the products.
    """
    x, slope = score_tile.scores(raw, high, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)  # pyright: ignore[reportGeneralTypeIssues]
    if SCORE.sigmoid is not None:
        weight, weight_slope = score_tile.sigmoid_slope(x)  # pyright: ignore[reportGeneralTypeIssues]
    elif SCORE.excess is not None:
        weight, weight_slope = score_tile.excess_weights(x - rest, SCORE, h)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        weight = tl.exp2(x - rest)
        weight_slope = weight
    kept_weight = weight
    if DROPOUT.rows is not None:
        dropped = score_tile.dropped(row_hash, column_hash, DROPOUT.threshold)
        kept_weight, grad_weight = tl.where(dropped, 0.0, weight), tl.where(dropped, 0.0, grad_weight)
    gradient = weight_slope * (grad_weight - delta)
    if CUT or REPAIR:
        live = keep & (high < INF)
        kept_weight, gradient = tl.where(live, kept_weight, 0.0), tl.where(live, gradient, 0.0)
    return kept_weight, gradient, slope


@triton.jit
def _add_to_line(LINE, gradient, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Add the sums over the diagonals of a tile to the gradient of a bias by distance: each row of the tile is moved
    by one more than the row above, so that diagonals are columns.
    """
    WIDTH: tl.constexpr = 2 * (BM if BM > BN else BN)
    i, column = tl.arange(0, BM)[:, None], tl.arange(0, WIDTH)
    j = column[None, :] + i - (BM - 1)
    inside = (j >= 0) & (j < BN)
    moved = tl.where(inside, tl.gather(gradient, tl.minimum(tl.maximum(j, 0), BN - 1), 1), 0.0)
    distance = n0 - m0 - (BM - 1) + column
    tl.atomic_add(LINE + distance, tl.sum(moved, 0), mask=(distance > -M) & (distance < N), sem="relaxed")


@triton.jit
def _add_to_pairs(BIAS, gradient, b, h, m, n, M, N):
    """Add the gradient of a tile to that of a bias over pairs, summed over the axes of the tile that this has not."""
    if BIAS.pairs_gradient_strides[2] is None:
        gradient, m = tl.sum(gradient, 0, keep_dims=True), tl.zeros([1, 1], tl.int32)
    if BIAS.pairs_gradient_strides[3] is None:
        gradient, n = tl.sum(gradient, 1, keep_dims=True), tl.zeros([1, 1], tl.int32)
    at = score_tile.pairs_at(BIAS.pairs_gradient, BIAS.pairs_gradient_strides, b, h, m, n)
    tl.atomic_add(at + tl.zeros(gradient.shape, tl.int32), gradient, mask=(m < M) & (n < N), sem="relaxed")


@triton.jit
def add_to_bias(BIAS, gradient, b, h, m, n, m0, n0, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Add the gradient of the scores of a tile to those of the bias that are asked for."""
    if BIAS.line_gradient is not None:
        _add_to_line(BIAS.line_gradient + h * BIAS.line_gradient_head, gradient, m0, n0, M, N, BM, BN)
    if BIAS.pairs_gradient is not None:
        _add_to_pairs(BIAS, gradient, b, h, m, n, M, N)
