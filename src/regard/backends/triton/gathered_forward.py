"""Attention to listed keys, forward: a program for some rows that share a list, which goes over the keys of the list.

As in `flash_forward`, a row to which a key of its list does not exist could meet 0 · NaN: programs whose output is not
finite say so in FLAGS, and the same source with REPAIR recomputes these.
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
from .score_tile import INF, LN2


@triton.jit
def gathered_forward(
    Q,
    K,
    V,
    OUTPUT,
    LSE,
    LISTS,
    ADDED,
    FACTORS,
    SCORE,
    BIAS,
    FLAGS,
    M,
    N,
    heads,
    key_heads,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of the rows of a program, see `listed_rows`.

    Q, K, V, OUTPUT, LSE: `StridedRows`; ADDED, FACTORS: likewise (B, H, M, length), or without a pointer. FLAGS: a
    number for each program, 0 at first, or None.
    """
    if REPAIR:  # noqa: SIM102  # the other has no FLAGS to load from
        if tl.load(FLAGS + tl.program_id(0)) == 0:
            return
    b, list_head, of_list, h, m, exist = listed_rows(LISTS, M, heads, BR)  # pyright: ignore[reportGeneralTypeIssues]
    key_head = (list_head * key_heads // LISTS.heads).to(tl.int64)
    keys, values = score_tile.head_rows(K, b, key_head), score_tile.head_rows(V, b, key_head)
    begin, end = list_spans(LISTS, b, m, exist)
    q = load_at(row_places(Q, b, h, m), exist, D, BD)
    start = list_start(LISTS, b, list_head, of_list)
    top, total = tl.full([BR], -INF, tl.float32), tl.zeros([BR], tl.float32)
    acc = tl.zeros([BR, BDV], tl.float32)
    for j0 in range(0, LISTS.length, BN):
        j = j0 + tl.arange(0, BN)
        n, listed = listed_keys(LISTS, start, j, N)
        k = load_at(keys + n * K.row, listed, D, BD)
        raw = score_tile.product(q, tl.trans(k), None, PRECISION)
        x, _, keep = listed_scores(raw, None, ADDED, SCORE, BIAS, LISTS, b, h, m, j, n, exist, listed, begin, end)
        now = tl.maximum(top, tl.max(x, 1))
        shift = tl.where(now == -INF, 0.0, now)
        p, rescale = tl.exp2(x - shift[:, None]), tl.exp2(top - shift)
        top, total, acc = now, total * rescale + tl.sum(p, 1), acc * rescale[:, None]
        if FACTORS.pointer is not None:
            p *= row_terms_at(FACTORS, b, h, m, j, exist, LISTS.length)
        v = load_at(values + n * V.row, listed, DV, BDV)
        acc = score_tile.weighted(acc, p, v, keep, PRECISION, True, REPAIR)
    if FLAGS is not None and not REPAIR:
        score_tile.note_not_finite(FLAGS + tl.program_id(0), acc)
    some = total != 0.0
    acc = acc * tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0)[:, None]
    lse = tl.where(some, (top + tl.log2(total)) * LN2, -INF)
    tl.store(row_places(LSE, b, h, m), lse, mask=exist)
    number = tl.arange(0, BDV)
    at = row_places(OUTPUT, b, h, m)[:, None] + number[None, :]
    tl.store(at, acc.to(OUTPUT.pointer.dtype.element_ty), mask=exist[:, None] & (number < DV)[None, :])
