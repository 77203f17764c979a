"""What the gradients need of each row: its log-sum-exp to the base 2, exactly, and delta."""

from __future__ import annotations

import triton
import triton.language as tl

from ...core.log_sum_exp import LARGEST_LSE
from . import score_tile
from .score_tile import INF, LOG2E

LOG2E_64 = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(LARGEST_LSE * 1.4426950408889634)
"""Up to this magnitude a log-sum-exp to the base 2 is taken as it is."""
SAME = tl.constexpr(2.0**-22)
"""Relative difference up to which a log-sum-exp is the rounded one of the same scores."""


@triton.jit
def two_parts(lse):
    """A log-sum-exp to the base 2 as a sum of two numbers, and whether it is finite; infinite and 0 where it is not.

    The second number is what rounding the first takes away: else all weights of a row would be off by it.
    """
    live = (lse - lse) == 0.0
    exact = tl.where(live, lse, 0.0).to(tl.float64) * LOG2E_64
    high = exact.to(tl.float32)
    return tl.where(live, high, INF), (exact - high.to(tl.float64)).to(tl.float32), live


@triton.jit
def store_terms(TERMS, plane, m, M, high, rest, delta):
    """Write what `load_terms` reads of rows m."""
    at, plane = TERMS + m, tl.cast(plane, tl.int64)
    tl.store(at, high, mask=m < M)
    tl.store(at + plane, rest, mask=m < M)
    tl.store(at + 2 * plane, delta, mask=m < M)


@triton.jit
def row_terms(
    OUTPUT,
    GRAD_OUTPUT,
    LSE,
    GRAD_LSE,
    TERMS,
    SCORE,
    ANY,
    M,
    heads,
    plane,
    keep_probability,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
):
    """Of each row the log-sum-exp to the base 2 as a sum of two numbers, and delta: TERMS (3, B, H, M) float32.

    delta = keep probability · (Σ grad_output · output - grad_lse). The log-sum-exp of rows that take no part is
    infinite. Of sigmoid attention, whose weights no sum divides, -b takes its place, and delta is 0.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    m0, head = program % tiles * BM, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    m = m0 + tl.arange(0, BM)
    output = score_tile.load_rows(score_tile.head_rows(OUTPUT, b, h), m0, M, OUTPUT.row, DV, BDV, BM)
    above = score_tile.load_rows(score_tile.head_rows(GRAD_OUTPUT, b, h), m0, M, GRAD_OUTPUT.row, DV, BDV, BM)
    bad = score_tile.not_finite(output)
    delta = tl.sum(tl.where(bad, 0.0, output.to(tl.float32) * above.to(tl.float32)), 1)
    if GRAD_LSE.pointer is not None:
        delta -= score_tile.row_numbers(GRAD_LSE, b, h, m, M, 0.0)
    tl.store(ANY + tl.zeros(output.shape, tl.int32), 1, mask=bad)
    high, rest, live = two_parts(score_tile.row_numbers(LSE, b, h, m, M, INF))  # pyright: ignore[reportGeneralTypeIssues]
    if SCORE.sigmoid is not None:
        none = tl.zeros([BM], tl.float32)
        high, rest, delta = tl.where(live, -tl.load(SCORE.sigmoid + h), INF), none, none
    store_terms(TERMS + head * M, plane, m, M, high, rest, tl.where(live, delta, 0.0) * keep_probability)


@triton.jit
def load_terms(TERMS, plane, m, M):
    """What `store_terms` wrote of rows m: the two parts of the log-sum-exp, and delta."""
    at, plane = TERMS + m, tl.cast(plane, tl.int64)
    high = tl.load(at, mask=m < M, other=INF)
    return high, tl.load(at + plane, mask=m < M, other=0.0), tl.load(at + 2 * plane, mask=m < M, other=0.0)


@triton.jit
def upstream(
    GRAD_OUTPUT, OUTPUT, b, h, m0, M, DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, REPAIR: tl.constexpr
):
    """The gradients of the output of some rows; in a repair 0 where the output is not finite."""
    above = score_tile.load_rows(score_tile.head_rows(GRAD_OUTPUT, b, h), m0, M, GRAD_OUTPUT.row, DV, BDV, BM)
    if REPAIR:
        output = score_tile.load_rows(score_tile.head_rows(OUTPUT, b, h), m0, M, OUTPUT.row, DV, BDV, BM)
        above = tl.where(score_tile.not_finite(output), 0.0, above).to(above.dtype)
    return above


@triton.jit
def _scores(q, k, LESS, SCORE, MASK, BIAS, b, h, s, m, n0, begin, end, M, N, BN: tl.constexpr, PRECISION: tl.constexpr):
    """The scores of a tile, less a number of each row, as the gradients compute them."""
    n = (n0 + tl.arange(0, BN))[None, :]
    raw = score_tile.product(q, tl.trans(k), None, PRECISION)
    keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    x, _ = score_tile.scores(raw, LESS, SCORE, BIAS, b, h, m, n, keep, M, N, True)  # pyright: ignore[reportGeneralTypeIssues]
    return x


@triton.jit
def refine_row_terms(
    Q,
    K,
    TERMS,
    SINKS,
    SCORE,
    MASK,
    BIAS,
    M,
    N,
    heads,
    group,
    plane,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The log-sum-exp of rows where float32 rounds it by too much: the largest score, and the logarithm of the rest.

    A program without such rows returns at once. One that is of more keys than there are here stays as it is: it is
    not what these scores give.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    tile, head = program % tiles, (program // tiles).to(tl.int64)
    rows = tile * BM + tl.arange(0, BM)
    at = TERMS + head * M + rows
    high = tl.load(at, mask=rows < M, other=INF)
    coarse = (tl.abs(high) > LARGEST) & (high < INF)
    if tl.max(coarse.to(tl.int32), 0) == 0:
        return
    b, h = head // heads, head % heads
    s, m = score_tile.mask_set(MASK, b, h), rows[:, None]
    q = score_tile.load_rows(score_tile.head_rows(Q, b, h), tile * BM, M, Q.row, D, BD, BM)
    keys = score_tile.head_rows(K, b, h // group)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    first, _, _, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    sink = tl.full([BM], -INF, tl.float32)
    if SINKS is not None:
        sink = tl.zeros([BM], tl.float32) + tl.load(SINKS + h) * LOG2E
    top = sink
    for i in range(first, last):
        n0 = score_tile.full_tile(MASK, i) * BN
        k = score_tile.load_rows(keys, n0, N, K.row, D, BD, BN)
        x = _scores(q, k, None, SCORE, MASK, BIAS, b, h, s, m, n0, begin, end, M, N, BN, PRECISION)
        top = tl.maximum(top, tl.max(x, 1))
    total = tl.exp2(sink - top)
    for i in range(first, last):
        n0 = score_tile.full_tile(MASK, i) * BN
        k = score_tile.load_rows(keys, n0, N, K.row, D, BD, BN)
        x = _scores(q, k, top[:, None], SCORE, MASK, BIAS, b, h, s, m, n0, begin, end, M, N, BN, PRECISION)
        total += tl.sum(tl.exp2(x), 1)
    rest, old = tl.log2(total), tl.load(at + plane, mask=rows < M, other=0.0)
    same = tl.abs((top - high) + (rest - old)) <= tl.abs(high) * SAME
    tl.store(at, top, mask=coarse & same)
    tl.store(at + plane, rest, mask=coarse & same)
