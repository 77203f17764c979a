"""The gradients of additive attention: of queries, weights and a bias by rows; of keys and values by columns.

As in `flash_backward`, numbers of the output that are not finite have gradient 0, and rows whose log-sum-exp is not
finite take no part. Values are set to finite ones in registers, so that no program computes anything twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .additive_scores import add_token_gradients, pair_scores
from .row_terms import LARGEST, SAME, load_terms, store_terms, two_parts
from .score_gradients import add_to_bias, score_gradient
from .score_tile import INF, LOG2E


@triton.jit
def _finite_rows(ROWS, b, h, first, count, start, D: tl.constexpr, B: tl.constexpr, AT_ONCE: tl.constexpr):
    """Some numbers of rows of a head, from `start` on, with 0 for what is not finite."""
    row, number = first + tl.arange(0, B), start + tl.arange(0, AT_ONCE)
    at = score_tile.head_rows(ROWS, b, h) + row.to(tl.int64)[:, None] * ROWS.row + number[None, :]
    x = tl.load(at, mask=(row < count)[:, None] & (number < D)[None, :], other=0.0)
    return tl.where(score_tile.not_finite(x), 0.0, x).to(x.dtype)


@triton.jit
def _upstream(GRAD_OUTPUT, OUTPUT, b, h, first, M, start, D: tl.constexpr, B: tl.constexpr, AT_ONCE: tl.constexpr):
    """Some numbers of the gradients of the output of rows; 0 where the output is not finite."""
    row, number = first + tl.arange(0, B), start + tl.arange(0, AT_ONCE)
    there = (row < M)[:, None] & (number < D)[None, :]
    at = score_tile.head_rows(OUTPUT, b, h) + row.to(tl.int64)[:, None] * OUTPUT.row + number[None, :]
    bad = score_tile.not_finite(tl.load(at, mask=there, other=0.0))
    at = score_tile.head_rows(GRAD_OUTPUT, b, h) + row.to(tl.int64)[:, None] * GRAD_OUTPUT.row + number[None, :]
    above = tl.load(at, mask=there, other=0.0)
    return tl.where(bad, 0.0, above).to(above.dtype)


@triton.jit
def _grad_weights(
    GRAD_OUTPUT,
    OUTPUT,
    V,
    b,
    h,
    key_head,
    m0,
    n0,
    M,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of the weights of a tile, grad_output · v, (BM, BN)."""
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, BD, AT_ONCE):
        above = _upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, start, D, BM, AT_ONCE)
        v = _finite_rows(V, b, key_head, n0, N, start, D, BN, AT_ONCE)
        total = score_tile.product(above, tl.trans(v), total, PRECISION)
    return total


@triton.jit
def _exact_lse(
    high,
    rest,
    QUERIES,
    KEYS,
    WEIGHT,
    SINKS,
    SCORE,
    MASK,
    BIAS,
    b,
    h,
    head,
    key_head,
    s,
    m0,
    begin,
    end,
    first,
    last,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The log-sum-exp of rows as a sum of two numbers: of those that float32 rounds by too much, from the scores.

    One that is of more keys than there are here stays as it is: it is not what these scores give.
    """
    coarse = (tl.abs(high) > LARGEST) & (high < INF)
    if tl.max(coarse.to(tl.int32), 0) != 0:
        m = (m0 + tl.arange(0, BM))[:, None]
        sink = tl.full([BM], -INF, tl.float32)
        if SINKS is not None:
            sink = tl.zeros([BM], tl.float32) + tl.load(SINKS + h) * LOG2E
        top, total = sink, tl.where(sink == -INF, 0.0, 1.0)
        for i in tl.range(first, last, num_stages=1):
            n0 = score_tile.full_tile(MASK, i) * BN
            n = (n0 + tl.arange(0, BN))[None, :]
            raw = pair_scores(QUERIES, KEYS, WEIGHT, head, key_head, h, m0, n0, BM, BN)
            keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
            x, _ = score_tile.scores(raw, None, SCORE, BIAS, b, h, m, n, keep, M, N, True)
            now = tl.maximum(top, tl.max(x, 1))
            shift = tl.where(now == -INF, 0.0, now)
            total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(x - shift[:, None]), 1)
            top = now
        logarithm = tl.log2(total)
        same = coarse & (tl.abs((top - high) + (logarithm - rest)) <= tl.abs(high) * SAME)
        high, rest = tl.where(same, top, high), tl.where(same, logarithm, rest)
    return high, rest


@triton.jit
def _query_tile(
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    GRAD_QUERY,
    TANH_SUMS,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    head,
    key_head,
    own,
    s,
    m0,
    n0,
    begin,
    end,
    row_hash,
    high,
    rest,
    delta,
    M,
    N,
    factor,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    VALUES: tl.constexpr,
    FEATURES: tl.constexpr,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what the pairs of a tile give to the gradients of queries, weights and the bias."""
    m, n = (m0 + tl.arange(0, BM))[:, None], (n0 + tl.arange(0, BN))[None, :]
    raw = pair_scores(QUERIES, KEYS, WEIGHT, head, key_head, h, m0, n0, BM, BN)
    grad_weight = _grad_weights(GRAD_OUTPUT, OUTPUT, V, b, h, own, m0, n0, M, N, DV, BDV, BM, BN, VALUES, PRECISION)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
    _, gradient, slope = score_gradient(
        *(raw, grad_weight, high, rest, delta, row_hash, column_hash, SCORE, BIAS, DROPOUT, b, h, m, n, keep, M, N),
        *(CUT, True),
    )
    add_to_bias(BIAS, gradient, b, h, m, n, m0, n0, M, N, BM, BN)
    add_token_gradients(
        *(gradient * slope, QUERIES, KEYS, WEIGHT, GRAD_QUERY, TANH_SUMS, head, key_head, b, h, h, m0, n0, M, factor),
        *(BM, BN, FEATURES),
    )


@triton.jit
def additive_query_gradient(
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    LSE,
    GRAD_LSE,
    SINKS,
    TERMS,
    GRAD_QUERY,
    TANH_SUMS,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    M,
    N,
    heads,
    group,
    plane,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    VALUES: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradient of a tile of queries, and Σ_j g_ij tanh(q_ia + k_ja) for that of the weights, to memory.

    Writes what the columns need of each row, TERMS (3, B, H, M): the log-sum-exp to the base 2 as a sum of two numbers,
    infinite where a row takes no part, and delta, as `row_terms`. VALUES, FEATURES: of how many numbers of values, and
    of how many features, the products are computed at once. Programs as of `additive_forward`.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    own = h // group
    key_head = b * (heads // group) + own
    s, m0 = score_tile.mask_set(MASK, b, h), tile * BM
    rows = m0 + tl.arange(0, BM)
    m = rows[:, None]
    begin, end = score_tile.row_spans(MASK, s, m, M)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    high, rest, live = two_parts(score_tile.row_numbers(LSE, b, h, rows, M, INF))  # pyright: ignore[reportGeneralTypeIssues]
    high, rest = _exact_lse(
        *(high, rest, QUERIES, KEYS, WEIGHT, SINKS, SCORE, MASK, BIAS, b, h, head, key_head, s, m0, begin, end),
        *(first, last, M, N, BM, BN),
    )
    delta = -score_tile.row_numbers(GRAD_LSE, b, h, rows, M, 0.0)
    for start in range(0, BDV, VALUES):
        above = _upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, start, DV, BM, VALUES).to(tl.float32)
        delta += tl.sum(above * _finite_rows(OUTPUT, b, h, m0, M, start, DV, BM, VALUES).to(tl.float32), 1)
    delta = tl.where(live, delta, 0.0) * DROPOUT.keep
    store_terms(TERMS + head * M, plane, rows, M, high, rest, delta)
    high, rest, delta = high[:, None], rest[:, None], delta[:, None]
    for i in tl.range(full, cut, num_stages=1):
        n0 = score_tile.full_tile(MASK, i) * BN
        _query_tile(
            *(QUERIES, KEYS, WEIGHT, V, GRAD_OUTPUT, OUTPUT, GRAD_QUERY, TANH_SUMS, SCORE, MASK, BIAS, DROPOUT, b, h),
            *(head, key_head, own, s, m0, n0, begin, end, row_hash, high, rest, delta, M, N, 1.0 / DROPOUT.keep),
            *(DV, BDV, BM, BN, VALUES, FEATURES, False, PRECISION),
        )
    for i in tl.range(0, full - first + last - cut, num_stages=1):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        _query_tile(
            *(QUERIES, KEYS, WEIGHT, V, GRAD_OUTPUT, OUTPUT, GRAD_QUERY, TANH_SUMS, SCORE, MASK, BIAS, DROPOUT, b, h),
            *(head, key_head, own, s, m0, n0, begin, end, row_hash, high, rest, delta, M, N, 1.0 / DROPOUT.keep),
            *(DV, BDV, BM, BN, VALUES, FEATURES, True, PRECISION),
        )


@triton.jit
def _key_tile(
    grad_value,
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    TERMS,
    GRAD_KEY,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    head,
    key_head,
    own,
    s,
    m0,
    n0,
    column_hash,
    heads,
    plane,
    M,
    N,
    factor,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    VALUES: tl.constexpr,
    FEATURES: tl.constexpr,
    CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running gradient of values after a tile, whose scores stand transposed: (BN, BM); adds that of the keys."""
    m, n = (m0 + tl.arange(0, BM))[None, :], (n0 + tl.arange(0, BN))[:, None]
    raw = pair_scores(KEYS, QUERIES, WEIGHT, key_head, head, h, n0, m0, BN, BM)
    grad_weight = tl.trans(
        _grad_weights(GRAD_OUTPUT, OUTPUT, V, b, h, own, m0, n0, M, N, DV, BDV, BM, BN, VALUES, PRECISION)
    )
    high, rest, delta = load_terms(TERMS + head * M, plane, m, M)
    keep = n < N
    if CUT:
        begin, end = score_tile.row_spans(MASK, s, m, M)
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    weight, gradient, slope = score_gradient(
        *(raw, grad_weight, high, rest, delta, row_hash, column_hash, SCORE, BIAS, DROPOUT, b, h, m, n, keep, M, N),
        *(CUT, True),
    )
    add_token_gradients(
        *(gradient * slope, KEYS, QUERIES, WEIGHT, GRAD_KEY, None, key_head, head, b, h, own, n0, m0, N, factor),
        *(BN, BM, FEATURES),
    )
    above = _upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, 0, DV, BM, BDV)
    return score_tile.product(weight.to(above.dtype), above, grad_value, PRECISION)


@triton.jit
def additive_key_gradient(
    QUERIES,
    KEYS,
    WEIGHT,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    TERMS,
    GRAD_KEY,
    GRAD_VALUE,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    M,
    N,
    heads,
    group,
    plane,
    DV: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    VALUES: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradient of a tile of keys to memory, and write that of its values, over all query heads that share them.

    Programs are numbered by batch, key head, tile of columns: under a causal mask the first take the longest.
    """
    program, tiles = tl.program_id(0), tl.cdiv(N, BN)
    tile, key_head = program % tiles, (program // tiles).to(tl.int64)
    key_heads = heads // group
    b, own, n0 = key_head // key_heads, key_head % key_heads, tile * BN
    n = (n0 + tl.arange(0, BN))[:, None]
    column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
    grad_value = tl.zeros([BN, BDV], tl.float32)
    for member in range(group):
        h = own * group + member
        head = b * heads + h
        s = score_tile.mask_set(MASK, b, h)
        first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, M, BM)
        for i in tl.range(full, cut, num_stages=1):
            m0 = score_tile.full_tile(MASK, i) * BM
            grad_value = _key_tile(
                *(grad_value, QUERIES, KEYS, WEIGHT, V, GRAD_OUTPUT, OUTPUT, TERMS, GRAD_KEY, SCORE, MASK, BIAS),
                *(DROPOUT, b, h, head, key_head, own, s, m0, n0, column_hash, heads, plane, M, N, 1.0 / DROPOUT.keep),
                *(DV, BDV, BM, BN, VALUES, FEATURES, False, PRECISION),
            )
        for i in tl.range(0, full - first + last - cut, num_stages=1):
            m0 = score_tile.cut_tile(MASK, i, first, full, cut) * BM
            grad_value = _key_tile(
                *(grad_value, QUERIES, KEYS, WEIGHT, V, GRAD_OUTPUT, OUTPUT, TERMS, GRAD_KEY, SCORE, MASK, BIAS),
                *(DROPOUT, b, h, head, key_head, own, s, m0, n0, column_hash, heads, plane, M, N, 1.0 / DROPOUT.keep),
                *(DV, BDV, BM, BN, VALUES, FEATURES, True, PRECISION),
            )
    number = tl.arange(0, BDV)[None, :]
    at = score_tile.head_rows(GRAD_VALUE, b, own) + n.to(tl.int64) * GRAD_VALUE.row + number
    grad_value = grad_value / DROPOUT.keep
    tl.store(at, grad_value.to(GRAD_VALUE.pointer.dtype.element_ty), mask=(n < N) & (number < DV))
