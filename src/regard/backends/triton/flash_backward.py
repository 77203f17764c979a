"""The gradients of flash attention: of queries and a bias, by rows of tiles; of keys and values, by columns.

A weight is computed again, exp2(score - log-sum-exp), from what `row_terms` computes of each row. One rule holds where
NaN or infinity is met: a number of the output that is not finite gets gradient 0, and a row whose log-sum-exp is not
finite takes no part; nor does a pair whose score infinity makes -inf, which has weight 0. ANY says whether there is
such a number of the output. Then the launches with REPAIR compute all programs, with 0 for what is not finite; else
those alone whose FLAGS say that 0 · NaN came in. The other launches return at once, so that the gradient of a bias is
added once, and nothing is read by the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .row_terms import load_terms, upstream
from .score_gradients import add_to_bias, score_gradient
from .score_tile import INF


@triton.jit
def _query_tile(
    acc,
    total,
    q,
    above,
    K,
    V,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    s,
    keys,
    values,
    m0,
    n0,
    begin,
    end,
    row_hash,
    high,
    rest,
    delta,
    any_bad,
    M,
    N,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running gradient of queries after a tile, and the sums of its rows; adds the tile's gradient of the bias."""
    m, n = (m0 + tl.arange(0, BM))[:, None], (n0 + tl.arange(0, BN))[None, :]
    k = score_tile.load_rows(keys, n0, N, K.row, D, BD, BN)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    if REPAIR:
        keep = keep & score_tile.finite_rows(k)[None, :]
    k = score_tile.only_finite(k, REPAIR)
    v = score_tile.only_finite(score_tile.load_rows(values, n0, N, V.row, DV, BDV, BN), REPAIR)
    raw = score_tile.product(q, tl.trans(k), None, PRECISION)
    grad_weight = score_tile.product(above, tl.trans(v), None, PRECISION)
    column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
    _, gradient, slope = score_gradient(
        *(raw, grad_weight, high, rest, delta, row_hash, column_hash, SCORE, BIAS, DROPOUT, b, h, m, n, keep, M, N),
        *(CUT, REPAIR),
    )
    if REPAIR:
        if any_bad != 0:  # else the other launch has added it
            add_to_bias(BIAS, gradient, b, h, m, n, m0, n0, M, N, BM, BN)
    else:
        add_to_bias(BIAS, gradient, b, h, m, n, m0, n0, M, N, BM, BN)
    if SCORE.sigmoid is not None:
        total += tl.sum(gradient, 1)
    gradient = gradient * slope
    return score_tile.product(gradient.to(k.dtype), k, acc, PRECISION), total


@triton.jit
def query_gradient(
    Q,
    K,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    TERMS,
    GRAD_QUERY,
    ROW_SUMS,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    FLAGS,
    ANY,
    M,
    N,
    heads,
    group,
    plane,
    result_factor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradient of a tile of queries, and what its pairs add to that of a bias. Programs as of `flash_forward`.

    ROW_SUMS: (B, H, M) float32, of sigmoid attention the sum of the gradients of each row's scores; or None.
    """
    program, tiles, any_bad = tl.program_id(0), tl.cdiv(M, BM), tl.load(ANY)
    if REPAIR:
        if (any_bad == 0) & (tl.load(FLAGS + program) == 0):
            return
    else:
        if any_bad != 0:
            return
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    s, m0 = score_tile.mask_set(MASK, b, h), tile * BM
    m = (m0 + tl.arange(0, BM))[:, None]
    q = score_tile.load_rows(score_tile.head_rows(Q, b, h), m0, M, Q.row, D, BD, BM)
    above = upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, DV, BDV, BM, REPAIR)
    keys, values = score_tile.head_rows(K, b, h // group), score_tile.head_rows(V, b, h // group)
    high, rest, delta = load_terms(TERMS + head * M, plane, m, M)
    if REPAIR:
        high = tl.where(score_tile.finite_rows(q)[:, None], high, INF)
    q = score_tile.only_finite(q, REPAIR)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    acc, total = tl.zeros([BM, BD], tl.float32), tl.zeros([BM], tl.float32)
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    for i in range(full, cut):
        n0 = score_tile.full_tile(MASK, i) * BN
        acc, total = _query_tile(
            *(acc, total, q, above, K, V, SCORE, MASK, BIAS, DROPOUT, b, h, s, keys, values, m0, n0, begin, end),
            *(row_hash, high, rest, delta, any_bad, M, N, D, DV, BD, BDV, BM, BN, False, REPAIR, PRECISION),
        )
    for i in range(full - first + last - cut):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        acc, total = _query_tile(
            *(acc, total, q, above, K, V, SCORE, MASK, BIAS, DROPOUT, b, h, s, keys, values, m0, n0, begin, end),
            *(row_hash, high, rest, delta, any_bad, M, N, D, DV, BD, BDV, BM, BN, True, REPAIR, PRECISION),
        )
    if not REPAIR:
        score_tile.note_not_finite(FLAGS + program, acc)
    if ROW_SUMS is not None:
        rows = m0 + tl.arange(0, BM)
        tl.store(ROW_SUMS + head * M + rows, total, mask=rows < M)
    number = tl.arange(0, BD)[None, :]
    at = score_tile.head_rows(GRAD_QUERY, b, h) + m.to(tl.int64) * GRAD_QUERY.row + number
    tl.store(at, (acc * result_factor).to(GRAD_QUERY.pointer.dtype.element_ty), mask=(m < M) & (number < D))


@triton.jit
def _key_tile(
    grad_key,
    grad_value,
    k,
    v,
    Q,
    GRAD_OUTPUT,
    OUTPUT,
    TERMS,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    s,
    heads,
    m0,
    n0,
    column_hash,
    plane,
    M,
    N,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running gradients of keys and values after a tile, whose scores stand transposed: (BN, BM)."""
    m, n = (m0 + tl.arange(0, BM))[None, :], (n0 + tl.arange(0, BN))[:, None]
    q = score_tile.load_rows(score_tile.head_rows(Q, b, h), m0, M, Q.row, D, BD, BM)
    high, rest, delta = load_terms(TERMS + (b * heads + h) * M, plane, m, M)
    if REPAIR:
        high = tl.where(score_tile.finite_rows(q)[None, :], high, INF)
    q = score_tile.only_finite(q, REPAIR)
    above = upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, DV, BDV, BM, REPAIR)
    raw = score_tile.product(k, tl.trans(q), None, PRECISION)
    grad_weight = score_tile.product(v, tl.trans(above), None, PRECISION)
    keep = n < N
    if CUT:
        begin, end = score_tile.row_spans(MASK, s, m, M)
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    weight, gradient, slope = score_gradient(
        *(raw, grad_weight, high, rest, delta, row_hash, column_hash, SCORE, BIAS, DROPOUT, b, h, m, n, keep, M, N),
        *(CUT, REPAIR),
    )
    grad_value = score_tile.product(weight.to(above.dtype), above, grad_value, PRECISION)
    gradient = gradient * slope
    return score_tile.product(gradient.to(q.dtype), q, grad_key, PRECISION), grad_value


@triton.jit
def key_gradient(
    Q,
    K,
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
    FLAGS,
    ANY,
    M,
    N,
    heads,
    group,
    plane,
    result_factor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of a tile of keys and of their values, over all query heads that share them.

    Programs are numbered by batch, key head, tile of columns: under a causal mask the first take the longest.
    """
    program, tiles, any_bad = tl.program_id(0), tl.cdiv(N, BN), tl.load(ANY)
    if REPAIR:
        if (any_bad == 0) & (tl.load(FLAGS + program) == 0):
            return
    else:
        if any_bad != 0:
            return
    tile, head = program % tiles, (program // tiles).to(tl.int64)
    key_heads = heads // group
    b, key_head = head // key_heads, head % key_heads
    n0 = tile * BN
    n = (n0 + tl.arange(0, BN))[:, None]
    k = score_tile.load_rows(score_tile.head_rows(K, b, key_head), n0, N, K.row, D, BD, BN)
    if REPAIR:
        read = score_tile.finite_rows(k)[:, None]
    k = score_tile.only_finite(k, REPAIR)
    v = score_tile.only_finite(
        score_tile.load_rows(score_tile.head_rows(V, b, key_head), n0, N, V.row, DV, BDV, BN), REPAIR
    )
    column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
    grad_key, grad_value = tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32)
    for own in range(group):
        h = key_head * group + own
        s = score_tile.mask_set(MASK, b, h)
        first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, M, BM)
        for i in range(full, cut):
            m0 = score_tile.full_tile(MASK, i) * BM
            grad_key, grad_value = _key_tile(
                *(grad_key, grad_value, k, v, Q, GRAD_OUTPUT, OUTPUT, TERMS, SCORE, MASK, BIAS, DROPOUT, b, h, s),
                *(heads, m0, n0, column_hash, plane, M, N, D, DV, BD, BDV, BM, BN, False, REPAIR, PRECISION),
            )
        for i in range(full - first + last - cut):
            m0 = score_tile.cut_tile(MASK, i, first, full, cut) * BM
            grad_key, grad_value = _key_tile(
                *(grad_key, grad_value, k, v, Q, GRAD_OUTPUT, OUTPUT, TERMS, SCORE, MASK, BIAS, DROPOUT, b, h, s),
                *(heads, m0, n0, column_hash, plane, M, N, D, DV, BD, BDV, BM, BN, True, REPAIR, PRECISION),
            )
    if REPAIR:
        grad_key, grad_value = tl.where(read, grad_key, 0.0), tl.where(read, grad_value, 0.0)
    else:
        score_tile.note_not_finite(FLAGS + program, tl.where(n < N, grad_key, 0.0))
        score_tile.note_not_finite(FLAGS + program, tl.where(n < N, grad_value, 0.0))
    at, value_at = tl.arange(0, BD)[None, :], tl.arange(0, BDV)[None, :]
    keys = score_tile.head_rows(GRAD_KEY, b, key_head) + n.to(tl.int64) * GRAD_KEY.row + at
    values = score_tile.head_rows(GRAD_VALUE, b, key_head) + n.to(tl.int64) * GRAD_VALUE.row + value_at
    tl.store(keys, (grad_key * result_factor).to(GRAD_KEY.pointer.dtype.element_ty), mask=(n < N) & (at < D))
    grad_value = grad_value / DROPOUT.keep
    tl.store(values, grad_value.to(GRAD_VALUE.pointer.dtype.element_ty), mask=(n < N) & (value_at < DV))
