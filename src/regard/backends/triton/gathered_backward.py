"""The gradients of attention to listed keys: of queries by rows, of keys and values added up in memory.

A weight is computed again, exp2(score - log-sum-exp). What lists give a key is added with atomic operations, in the
order in which programs come: sums are rounded differently from call to call. So a program may not be computed twice, as
`flash_backward` computes those that met 0 · NaN: ANY says beforehand whether any number of query, key, value and output
is not finite. Then the launch with REPAIR computes all programs by the rule of `flash_backward`, and else the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .listed_tile import (
    list_spans,
    list_start,
    listed_keys,
    listed_rows,
    listed_scores,
    load_at,
    row_places,
    row_terms_at,
)
from .row_terms import LARGEST, SAME
from .score_tile import INF, LOG2E


@triton.jit
def load_terms_at(TERMS, plane, b, h, m, heads, M, exist):
    """What `row_terms` wrote of rows m of heads h: the two parts of the log-sum-exp, and delta; and where it is."""
    at, plane = TERMS + (b * heads + h) * M + m, tl.cast(plane, tl.int64)
    high = tl.load(at, mask=exist, other=INF)
    return high, tl.load(at + plane, mask=exist, other=0.0), tl.load(at + 2 * plane, mask=exist, other=0.0), at


@triton.jit
def refine_listed_terms(
    Q,
    K,
    TERMS,
    SINKS,
    LISTS,
    ADDED,
    SCORE,
    BIAS,
    M,
    N,
    heads,
    key_heads,
    plane,
    D: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`row_terms.refine_row_terms` over listed keys: a program without rows of a large log-sum-exp returns at once."""
    b, list_head, of_list, h, m, exist = listed_rows(LISTS, M, heads, BR)  # pyright: ignore[reportGeneralTypeIssues]
    high, old, _, at = load_terms_at(TERMS, plane, b, h, m, heads, M, exist)
    coarse = (tl.abs(high) > LARGEST) & (high < INF)
    if tl.max(coarse.to(tl.int32), 0) == 0:
        return
    keys = score_tile.head_rows(K, b, (list_head * key_heads // LISTS.heads).to(tl.int64))
    begin, end = list_spans(LISTS, b, m, exist)
    q = load_at(row_places(Q, b, h, m), exist, D, BD)
    start = list_start(LISTS, b, list_head, of_list)
    sink = tl.full([BR], -INF, tl.float32)
    if SINKS is not None:
        sink = tl.load(SINKS + h, mask=exist, other=-INF) * LOG2E
    top, total = sink, tl.where(sink == -INF, 0.0, 1.0)
    for j0 in range(0, LISTS.length, BN):
        j = j0 + tl.arange(0, BN)
        n, listed = listed_keys(LISTS, start, j, N)
        k = load_at(keys + n * K.row, listed, D, BD)
        raw = score_tile.product(q, tl.trans(k), None, PRECISION)
        x = listed_scores(raw, None, ADDED, SCORE, BIAS, LISTS, b, h, m, j, n, exist, listed, begin, end)[0]
        now = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(now == -INF, 0.0, now)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(x - shift[:, None]), 1)
        top = now
    rest = tl.log2(total)
    same = tl.abs((top - high) + (rest - old)) <= tl.abs(high) * SAME
    tl.store(at, top, mask=coarse & same)
    tl.store(at + tl.cast(plane, tl.int64), rest, mask=coarse & same)


@triton.jit
def add_rows(POINTER, places, x, listed, D: tl.constexpr, BD: tl.constexpr):
    """Add the rows of a tile to those of D numbers, float32, that begin at these places."""
    number = tl.arange(0, BD)
    mask = listed[:, None] & (number < D)[None, :]
    tl.atomic_add(POINTER + places[:, None] + number[None, :], x, mask=mask, sem="relaxed")


@triton.jit
def gathered_backward(
    Q,
    K,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    TERMS,
    GRAD_QUERY,
    GRAD_KEY,
    GRAD_VALUE,
    GRAD_ADDED,
    LISTS,
    ADDED,
    FACTORS,
    SCORE,
    BIAS,
    ANY,
    M,
    N,
    heads,
    key_heads,
    plane,
    result_factor,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of the rows of a program, see `listed_rows`, and what they add to those of keys and values.

    GRAD_KEY, GRAD_VALUE: float32 (B, Hk, N, ·), contiguous, added to. GRAD_ADDED: `StridedRows` (B, H, M, length) of
    the gradients of scores before the softcap, or without a pointer. ANY: not 0 where a number is not finite.
    """
    any_bad = tl.load(ANY)
    if REPAIR:
        if any_bad == 0:
            return
    else:
        if any_bad != 0:
            return
    b, list_head, of_list, h, m, exist = listed_rows(LISTS, M, heads, BR)  # pyright: ignore[reportGeneralTypeIssues]
    key_head = (list_head * key_heads // LISTS.heads).to(tl.int64)
    keys, values = score_tile.head_rows(K, b, key_head), score_tile.head_rows(V, b, key_head)
    begin, end = list_spans(LISTS, b, m, exist)
    q = load_at(row_places(Q, b, h, m), exist, D, BD)
    above = load_at(row_places(GRAD_OUTPUT, b, h, m), exist, DV, BDV)
    high, rest, delta, _ = load_terms_at(TERMS, plane, b, h, m, heads, M, exist)
    if REPAIR:
        high = tl.where(score_tile.finite_rows(q), high, INF)
        q = score_tile.only_finite(q, REPAIR)
        output = load_at(row_places(OUTPUT, b, h, m), exist, DV, BDV)
        above = tl.where(score_tile.not_finite(output), 0.0, above).to(above.dtype)
    start = list_start(LISTS, b, list_head, of_list)
    first = (b * key_heads + key_head) * N
    acc = tl.zeros([BR, BD], tl.float32)
    for j0 in range(0, LISTS.length, BN):
        j = j0 + tl.arange(0, BN)
        n, listed = listed_keys(LISTS, start, j, N)
        k, v = load_at(keys + n * K.row, listed, D, BD), load_at(values + n * V.row, listed, DV, BDV)
        if REPAIR:
            listed = listed & score_tile.finite_rows(k)
            k, v = score_tile.only_finite(k, REPAIR), score_tile.only_finite(v, REPAIR)
        raw = score_tile.product(q, tl.trans(k), None, PRECISION)
        grad_weight = score_tile.product(above, tl.trans(v), None, PRECISION)
        x, slope, keep = listed_scores(
            *(raw, high[:, None], ADDED, SCORE, BIAS, LISTS, b, h, m, j, n, exist, listed, begin, end),
        )
        weight = tl.exp2(x - rest[:, None])
        used = weight
        if FACTORS.pointer is not None:
            factors = row_terms_at(FACTORS, b, h, m, j, exist, LISTS.length)
            used, grad_weight = weight * factors, grad_weight * factors
        gradient = weight * (grad_weight - delta[:, None])
        if REPAIR:
            live = keep & (high < INF)[:, None]
            used, gradient = tl.where(live, used, 0.0), tl.where(live, gradient, 0.0)
        if GRAD_ADDED.pointer is not None:
            at = row_places(GRAD_ADDED, b, h, m)[:, None] + j[None, :]
            tl.store(at, gradient, mask=exist[:, None] & (j < LISTS.length)[None, :])
        gradient = (gradient * slope).to(q.dtype)
        add_rows(
            *(GRAD_VALUE, (first + n) * DV, score_tile.product(tl.trans(used.to(above.dtype)), above, None, PRECISION)),
            *(listed, DV, BDV),
        )
        of_key = score_tile.product(tl.trans(gradient), q, None, PRECISION) * result_factor
        add_rows(GRAD_KEY, (first + n) * D, of_key, listed, D, BD)
        acc = score_tile.product(gradient, k, acc, PRECISION)
    number = tl.arange(0, BD)
    at = row_places(GRAD_QUERY, b, h, m)[:, None] + number[None, :]
    acc = (acc * result_factor).to(GRAD_QUERY.pointer.dtype.element_ty)
    tl.store(at, acc, mask=exist[:, None] & (number < D)[None, :])
