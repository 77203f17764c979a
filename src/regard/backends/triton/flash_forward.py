"""Flash attention forward: a program for each tile of rows of a head, which goes over the tiles of keys it attends to.

Full tiles come first, then those that the mask or the last key cuts. A key that a row does not attend to would reach
its output where it is not finite, as 0 · NaN is NaN: programs whose output is not finite say so in FLAGS, and the same
source with REPAIR recomputes these; all others return at once. So a mask costs the usual case no test of values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .score_tile import INF, LN2, LOG2E


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k,
    v,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    b,
    h,
    s,
    m,
    n0,
    begin,
    end,
    row_hash,
    M,
    N,
    BN: tl.constexpr,
    NEGATIVE: tl.constexpr,
    CUT: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The running output, maximum and sum of rows m after the keys k and values v from n0 on; q and k are split rows.

    Weights of sigmoid attention are as they are: nothing is scaled by a maximum. Of weights above a threshold, that is
    the maximum here.
    """
    n = (n0 + tl.arange(0, BN))[None, :]
    raw = score_tile.split_product(q, k, PRECISION)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    if SCORE.sigmoid is not None:
        less = -tl.load(SCORE.sigmoid + h)
        x, _ = score_tile.scores(raw, less, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
        p = score_tile.sigmoid(x)
    elif SCORE.excess is not None:
        x, _ = score_tile.scores(raw, top[:, None], SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
        p, _ = score_tile.excess_weights(x, SCORE, h)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        x, _ = score_tile.scores(raw, None, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)
        if CUT or NEGATIVE or SCORE.cap is not None or BIAS.line is not None or BIAS.pairs is not None:
            now = tl.maximum(top, tl.max(x, 1))
        else:
            now = tl.maximum(top, tl.max(raw, 1) * SCORE.factor)  # so that a score less the maximum is one instruction
        shift = tl.where(now == -INF, 0.0, now)
        p, rescale = tl.exp2(x - shift[:, None]), tl.exp2(top - shift)
        top, total, acc = now, total * rescale, acc * rescale[:, None]
    total += tl.sum(p, 1)
    if DROPOUT.rows is not None:
        column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
        p = tl.where(score_tile.dropped(row_hash, column_hash, DROPOUT.threshold), 0.0, p)
    return score_tile.weighted(acc, p, v, keep, PRECISION, CUT, REPAIR), top, total


@triton.jit
def flash_forward(
    Q,
    K,
    V,
    OUTPUT,
    LSE,
    OLD_OUTPUT,
    OLD_LSE,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    FLAGS,
    M,
    N,
    heads,
    group,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    REST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    NEGATIVE: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output and log-sum-exp of a tile of rows; merged with those of other keys where there are OLD ones.

    Of sigmoid attention, whose weights no sum divides, the logarithm of their sum is written in its place. Of weights
    above a threshold, LSE has the thresholds, which `row_thresholds` has found.

    Q, K, V, OUTPUT, LSE, OLD_OUTPUT, OLD_LSE: `StridedRows`. FLAGS: a number for each program, 0 at first, or None.
    REST: of wide queries and keys, the columns of a second tile beside BD, else 0.
    NEGATIVE: whether SCORE.factor is below 0. Programs are numbered by batch, head, tile of rows, last tiles first:
    under a causal mask these take the longest.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    if REPAIR:  # noqa: SIM102  # the other has no FLAGS to load from
        if tl.load(FLAGS + program) == 0:
            return
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    s = score_tile.mask_set(MASK, b, h)
    m0 = tile * BM
    rows = m0 + tl.arange(0, BM)
    m = rows[:, None]
    q = score_tile.load_split_rows(score_tile.head_rows(Q, b, h), m0, M, Q.row, D, BD, REST, BM)
    keys, values = score_tile.head_rows(K, b, h // group), score_tile.head_rows(V, b, h // group)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    top = tl.full([BM], -INF if SCORE.sigmoid is None else 0.0, tl.float32)
    if SCORE.excess is not None:
        top = score_tile.row_numbers(LSE, b, h, rows, M, -INF)
        top = tl.where(top == -INF, INF, score_tile.unscaled(top, SCORE, h))  # a row without keys: no score is above
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    if OLD_LSE.pointer is not None:
        old = score_tile.row_numbers(OLD_LSE, b, h, rows, M, -INF)
        if SCORE.sigmoid is None:
            top, total = old * LOG2E, tl.where(old == -INF, 0.0, 1.0)
        else:
            total = tl.exp2(old * LOG2E)
        before = score_tile.load_rows(score_tile.head_rows(OLD_OUTPUT, b, h), m0, M, OLD_OUTPUT.row, DV, BDV, BM)
        acc = before.to(tl.float32) * DROPOUT.keep
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    for i in range(full, cut):
        n0 = score_tile.full_tile(MASK, i) * BN
        k = score_tile.load_split_rows(keys, n0, N, K.row, D, BD, REST, BN)
        v = score_tile.load_rows(values, n0, N, V.row, DV, BDV, BN)
        acc, top, total = _attend(
            *(acc, top, total, q, k, v, SCORE, MASK, BIAS, DROPOUT, b, h, s, m, n0, begin, end, row_hash, M, N),
            *(BN, NEGATIVE, False, REPAIR, PRECISION),
        )
    for i in range(full - first + last - cut):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        k = score_tile.load_split_rows(keys, n0, N, K.row, D, BD, REST, BN)
        v = score_tile.load_rows(values, n0, N, V.row, DV, BDV, BN)
        acc, top, total = _attend(
            *(acc, top, total, q, k, v, SCORE, MASK, BIAS, DROPOUT, b, h, s, m, n0, begin, end, row_hash, M, N),
            *(BN, NEGATIVE, True, REPAIR, PRECISION),
        )
    if FLAGS is not None and not REPAIR:
        score_tile.note_not_finite(FLAGS + program, acc)
    some = total != 0.0
    if SCORE.sigmoid is None:
        share = tl.where(some, 1.0 / (tl.where(some, total, 1.0) * DROPOUT.keep), 0.0)
    else:
        share = tl.zeros([BM], tl.float32) + 1.0 / DROPOUT.keep
    if SCORE.excess is None:
        lse = tl.where(some, (top + tl.log2(total)) * LN2, -INF)
        tl.store(score_tile.head_rows(LSE, b, h) + rows.to(tl.int64) * LSE.row, lse, mask=rows < M)
    number = tl.arange(0, BDV)[None, :]
    at = score_tile.head_rows(OUTPUT, b, h) + m.to(tl.int64) * OUTPUT.row + number
    tl.store(at, (acc * share[:, None]).to(OUTPUT.pointer.dtype.element_ty), mask=(m < M) & (number < DV))
