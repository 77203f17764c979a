"""What lenses add up over the weights, in one pass over the tiles: a program goes along some rows of one head.

A weight is exp2 of its exponent, (score - lse) · log₂ e, and is not stored unless the matrix is wanted. Within a tile
sums are float32, across tiles float64: those of rows stay with the program, all others are added atomically. What is
wanted comes as `lens_arguments.WantedSums`; the rest is compiled away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...lenses import forms
from .lens_cells import add_to_cells, add_to_histogram
from .lens_topk import empty_slots, insert_largest, store_largest
from .score_tile import (
    INF,
    INTERPRETED,
    LOG2E,
    cut_tile,
    full_tile,
    head_rows,
    kept,
    load_rows,
    mask_set,
    not_finite,
    pairs_at,
    product,
    row_spans,
    scores,
    tile_range,
)

FAR = tl.constexpr(forms.FAR)


@triton.jit
def floored(x):
    """x, or -FAR where it is NaN or less: one instruction on a GPU, whose maximum is the number beside NaN."""
    if INTERPRETED:
        return tl.where(x > -FAR, x, -FAR)
    else:
        return tl.maximum(x, -FAR)


@triton.jit
def exponents(
    q,
    shift,
    KEYS,
    SCORE,
    MASK,
    BIAS,
    KEEP,
    b,
    h,
    G,
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
    """The exponents of a tile, (BM, BN): -FAR where there is no pair, and in rows whose shift is infinite.

    So NaN in a key that the mask leaves out meets nothing, and the product of a weight and its exponent is never NaN.
    """
    n = (n0 + tl.arange(0, BN))[None, :]
    k = load_rows(head_rows(KEYS, b, h // G), n0, N, KEYS.row, D, BD, BN)
    raw = product(q, tl.trans(k), None, PRECISION)
    keep = n < N
    if CUT:
        keep = kept(MASK, mask_set(MASK, b, h), m, n, n0, begin, end, M, N, BN)
        if KEEP.pairs is not None:
            at = pairs_at(KEEP.pairs, KEEP.strides, b, h, m, n)
            keep = keep & (tl.load(at, mask=(m < M) & (n < N), other=0) != 0)
    x, _ = scores(raw, shift[:, None], SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
    return floored(x)


@triton.jit
def distances(POSITIONS, m, n, M, N):
    """The distance of each pair's positions, int32."""
    queries = tl.load(POSITIONS.queries + m, mask=m < M, other=0)
    return tl.abs(queries[:, None] - tl.load(POSITIONS.keys + n, mask=n < N, other=0)[None, :])


@triton.jit
def add_to_columns(INTO, values, n, N):
    """Add the values of a tile to the sums of its columns."""
    tl.atomic_add(INTO + n, tl.sum(values, 0).to(tl.float64), mask=n < N, sem="relaxed")


@triton.jit
def store_matrix(MATRIX, weight, exponent, b, h, m, n, M, N):
    """Store the weights of a tile, and if wanted their products with their exponents."""
    offset = b * MATRIX.weights.batch + h * MATRIX.weights.head
    at = offset + (m.to(tl.int64) * MATRIX.weights.row)[:, None] + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(MATRIX.weights.pointer + at, weight, mask=inside)
    if MATRIX.logs is not None:
        tl.store(MATRIX.logs + at, weight * exponent, mask=inside)


@triton.jit
def add_tile(
    weights,
    logs,
    moments,
    top,
    top_columns,
    exponent,
    WANTED,
    b,
    h,
    pair,
    m0,
    n0,
    M,
    N,
    K: tl.constexpr,
    BINS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add a tile to all that is wanted; what this program keeps of its rows is returned."""
    m, n = m0 + tl.arange(0, BM), n0 + tl.arange(0, BN)
    weight = tl.exp2(exponent)
    log, moment = weight * exponent, weight
    if WANTED.positions.keys is not None:
        apart = distances(WANTED.positions, m, n, M, N)
        moment = weight * apart.to(tl.float32)
        if WANTED.histogram.sums is not None:
            add_to_histogram(WANTED.histogram, weight, apart, pair, m0 // BM, n0 // BN, BINS)
    if WANTED.rows.weight is not None:
        weights += tl.sum(weight, 1).to(tl.float64)
    if WANTED.rows.weight_log2_weight is not None:
        logs += tl.sum(log, 1).to(tl.float64)
    if WANTED.rows.weight_distance is not None:
        moments += tl.sum(moment, 1).to(tl.float64)
    if WANTED.columns.weight is not None:
        add_to_columns(WANTED.columns.weight + pair * N, weight, n, N)
    if WANTED.columns.weight_log2_weight is not None:
        add_to_columns(WANTED.columns.weight_log2_weight + pair * N, log, n, N)
    if WANTED.columns.weight_distance is not None:
        add_to_columns(WANTED.columns.weight_distance + pair * N, moment, n, N)
    CELLS = WANTED.cells
    if CELLS.sums.weight is not None:
        add_to_cells(CELLS.sums.weight, CELLS, weight, pair, m, n, m0 // BM, n0 // BN, M, N, True)
    if CELLS.sums.weight_log2_weight is not None:
        add_to_cells(CELLS.sums.weight_log2_weight, CELLS, log, pair, m, n, m0 // BM, n0 // BN, M, N, True)
    if CELLS.sums.weight_distance is not None:
        add_to_cells(CELLS.sums.weight_distance, CELLS, moment, pair, m, n, m0 // BM, n0 // BN, M, N, True)
    if CELLS.maxima is not None:
        add_to_cells(CELLS.maxima, CELLS, weight, pair, m, n, m0 // BM, n0 // BN, M, N, False)
    if WANTED.matrix.weights.pointer is not None:
        store_matrix(WANTED.matrix, weight, exponent, b, h, m, n, M, N)
    if K > 0:
        top, top_columns = insert_largest(top, top_columns, exponent, n0, K)  # pyright: ignore[reportGeneralTypeIssues]
    return weights, logs, moments, top, top_columns


@triton.jit
def add_rows(INTO, m, M, sums):
    """Add sums of rows, which no other program adds to."""
    tl.store(INTO + m, tl.load(INTO + m, mask=m < M, other=0.0) + sums, mask=m < M)


@triton.jit
def reduce_rows(
    QUERIES,
    KEYS,
    LSE,
    SCORE,
    MASK,
    BIAS,
    KEEP,
    WANTED,
    H,
    G,
    M,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BM rows of a head against all tiles that the mask leaves them: H heads, G of each key head."""
    lines = tl.cdiv(M, BM)
    pid = tl.program_id(0)
    line, pair = lines - 1 - pid % lines, (pid // lines).to(tl.int64)  # the last rows of a causal mask are the longest
    b, h, m0 = pair // H, pair % H, line * BM
    r = m0 + tl.arange(0, BM)
    m = r[:, None]
    q = load_rows(head_rows(QUERIES, b, h), m0, M, QUERIES.row, D, BD, BM)
    lse = tl.load(LSE + pair * M + r, mask=r < M, other=INF)
    shift = tl.where(not_finite(lse), INF, lse * LOG2E)
    s = mask_set(MASK, b, h)
    begin, end = row_spans(MASK, s, m, M)
    first, full, cut, last = tile_range(MASK, s, line, lines, N, BN)
    if KEEP.pairs is not None:
        first, full, cut = 0, 0, 0
    weights, logs, moments = tl.zeros([BM], tl.float64), tl.zeros([BM], tl.float64), tl.zeros([BM], tl.float64)
    top, top_columns = empty_slots(BM, K, SLOTS)
    for i in range(full, cut):
        n0 = full_tile(MASK, i) * BN
        x = exponents(
            q, shift, KEYS, SCORE, MASK, BIAS, KEEP, b, h, G, m, n0, begin, end, M, N, D, BD, BN, False, PRECISION
        )
        weights, logs, moments, top, top_columns = add_tile(
            weights, logs, moments, top, top_columns, x, WANTED, b, h, pair, m0, n0, M, N, K, BINS, BM, BN
        )
    for i in range(full - first + last - cut):
        n0 = cut_tile(MASK, i, first, full, cut) * BN
        x = exponents(
            q, shift, KEYS, SCORE, MASK, BIAS, KEEP, b, h, G, m, n0, begin, end, M, N, D, BD, BN, True, PRECISION
        )
        weights, logs, moments, top, top_columns = add_tile(
            weights, logs, moments, top, top_columns, x, WANTED, b, h, pair, m0, n0, M, N, K, BINS, BM, BN
        )
    if WANTED.rows.weight is not None:
        add_rows(WANTED.rows.weight + pair * M, r, M, weights)
    if WANTED.rows.weight_log2_weight is not None:
        add_rows(WANTED.rows.weight_log2_weight + pair * M, r, M, logs)
    if WANTED.rows.weight_distance is not None:
        add_rows(WANTED.rows.weight_distance + pair * M, r, M, moments)
    if K > 0:
        store_largest(WANTED.largest, top, top_columns, pair * M + m0, M - m0, K)
