"""What the gradients of sparsemax and entmax need of each row: its threshold, exactly, and delta.

Of weights w with t = w^(2 - α), the gradient of a score is t · (grad_weight - delta), delta = Σ t · grad_weight / Σ t:
Peters et al. 2019 (arXiv 1905.05702).
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import score_tile
from .row_terms import load_terms, store_terms, upstream
from .row_thresholds import last_step
from .score_tile import INF, LN2


@triton.jit
def _tile_terms(
    total,
    slopes,
    joint,
    weighted,
    entropy,
    entropy_joint,
    q,
    above,
    high,
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
    m,
    n0,
    begin,
    end,
    row_hash,
    M,
    N,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Σ w, Σ t and Σ t · grad_weight of each row after a tile, for t = w^(2 - α).

    Of any power besides Σ w · grad_weight, Σ e and Σ e · grad_weight, for e = -w log w.
    """
    n = (n0 + tl.arange(0, BN))[None, :]
    k = score_tile.load_rows(keys, n0, N, K.row, D, BD, BN)
    v = score_tile.only_finite(score_tile.load_rows(values, n0, N, V.row, DV, BDV, BN), REPAIR)
    raw = score_tile.product(q, tl.trans(k), None, PRECISION)
    grad_weight = score_tile.product(above, tl.trans(v), None, PRECISION)
    keep = n < N
    if CUT:
        keep = score_tile.kept(MASK, s, m, n, n0, begin, end, M, N, BN)
    x, _ = score_tile.scores(raw, high, SCORE, BIAS, b, h, m, n, keep, M, N, CUT)  # pyright: ignore[reportGeneralTypeIssues]
    weight, slope = score_tile.excess_weights(x, SCORE, h)  # pyright: ignore[reportGeneralTypeIssues]
    if DROPOUT.rows is not None:
        column_hash = score_tile.column_hashes(DROPOUT, b, n, N)
        grad_weight = tl.where(score_tile.dropped(row_hash, column_hash, DROPOUT.threshold), 0.0, grad_weight)
    if SCORE.powers is not None:
        terms = -weight * tl.log2(tl.where(weight > 0.0, weight, 1.0)) * LN2
        weighted += tl.sum(weight * grad_weight, 1)
        entropy += tl.sum(terms, 1)
        entropy_joint += tl.sum(terms * grad_weight, 1)
    total, slopes, joint = total + tl.sum(weight, 1), slopes + tl.sum(slope, 1), joint + tl.sum(slope * grad_weight, 1)
    return total, slopes, joint, weighted, entropy, entropy_joint


@triton.jit
def _rest(SCORE, h, threshold, total, slopes):
    """What a threshold lacks: a step as in `row_thresholds`, which leaves no larger one."""
    slope = slopes * score_tile.excess_of(SCORE, h)
    if SCORE.powers is not None:
        share, most = 1.0 - tl.load(SCORE.powers + h), last_step(threshold)
        return tl.minimum(tl.maximum((total - tl.exp2(tl.log2(total) * share)) / slope, -most), most)
    elif SCORE.squared is not None:
        norm = tl.sqrt(total)
        return norm * (norm - 1.0) / slope
    else:
        return (total - 1.0) / slope


@triton.jit
def _power_gradient(SCORE, h, total, delta, weighted, entropy, entropy_joint):
    """The gradient of α of each row, of weights that are divided by their sum: Correia et al. 2019 (arXiv 1909.00015).

    (Σ w g - delta) / (α - 1)² + (Σ e g - delta Σ e) / (α - 1), for e = -w log w and g the gradient of w.
    """
    power, size = tl.load(SCORE.powers + h), tl.log2(total) * LN2
    weighted, entropy, entropy_joint = weighted / total, entropy / total + size, entropy_joint / total
    entropy_joint += size * weighted
    return (weighted - delta) / (power * power) + (entropy_joint - delta * entropy) / power


@triton.jit
def threshold_terms(
    Q,
    K,
    V,
    GRAD_OUTPUT,
    OUTPUT,
    THRESHOLDS,
    TERMS,
    ROW_SUMS,
    SCORE,
    MASK,
    BIAS,
    DROPOUT,
    ANY,
    M,
    N,
    heads,
    group,
    plane,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REPAIR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As `row_terms` of a log-sum-exp: of each row the threshold as a sum of two numbers, and delta.

    The second number is what the weights lack of a sum of 1, which rounds the threshold: a step more. delta is
    Σ t · grad_weight / Σ t for t = w^(2 - α), times the keep probability: grad_output · output is something else here.
    ROW_SUMS: (B, H, M) float32, the gradient of α of each row; or None. ANY becomes 1 where the output is not finite.
    Then, and where delta is not, as 0 · NaN of a value is NaN, the same source with REPAIR computes a program again, by
    the rule of `flash_backward`.
    """
    program, tiles = tl.program_id(0), tl.cdiv(M, BM)
    tile, head = tiles - 1 - program % tiles, (program // tiles).to(tl.int64)
    b, h = head // heads, head % heads
    s, m0 = score_tile.mask_set(MASK, b, h), tile * BM
    rows = m0 + tl.arange(0, BM)
    if REPAIR:
        _, _, delta = load_terms(TERMS + head * M, plane, rows, M)
        if (tl.load(ANY) == 0) & (tl.max(score_tile.not_finite(delta).to(tl.int32), 0) == 0):
            return
    else:
        output = score_tile.load_rows(score_tile.head_rows(OUTPUT, b, h), m0, M, OUTPUT.row, DV, BDV, BM)
        score_tile.note_not_finite(ANY, output)
    m = rows[:, None]
    q = score_tile.load_rows(score_tile.head_rows(Q, b, h), m0, M, Q.row, D, BD, BM)
    above = upstream(GRAD_OUTPUT, OUTPUT, b, h, m0, M, DV, BDV, BM, REPAIR)
    keys, values = score_tile.head_rows(K, b, h // group), score_tile.head_rows(V, b, h // group)
    begin, end = score_tile.row_spans(MASK, s, m, M)
    row_hash = score_tile.row_hashes(DROPOUT, b, h, heads, m, M)
    found = score_tile.row_numbers(THRESHOLDS, b, h, rows, M, INF)
    live = (found - found) == 0.0
    high = tl.where(live, score_tile.unscaled(found, SCORE, h), INF)
    total, slopes, joint = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    weighted, entropy, entropy_joint = total, total, total
    first, full, cut, last = score_tile.tile_range(MASK, s, tile, tiles, N, BN)
    for i in range(full, cut):
        n0 = score_tile.full_tile(MASK, i) * BN
        total, slopes, joint, weighted, entropy, entropy_joint = _tile_terms(
            *(total, slopes, joint, weighted, entropy, entropy_joint, q, above, high[:, None], K, V, SCORE, MASK),
            *(BIAS, DROPOUT, b, h, s, keys, values, m, n0, begin, end, row_hash, M, N, D, DV, BD, BDV, BN),
            *(False, REPAIR, PRECISION),
        )
    for i in range(full - first + last - cut):
        n0 = score_tile.cut_tile(MASK, i, first, full, cut) * BN
        total, slopes, joint, weighted, entropy, entropy_joint = _tile_terms(
            *(total, slopes, joint, weighted, entropy, entropy_joint, q, above, high[:, None], K, V, SCORE, MASK),
            *(BIAS, DROPOUT, b, h, s, keys, values, m, n0, begin, end, row_hash, M, N, D, DV, BD, BDV, BN),
            *(True, REPAIR, PRECISION),
        )
    some = live & (slopes > 0.0)
    total, slopes = tl.where(some, total, 1.0), tl.where(some, slopes, 1.0)
    rest, delta = _rest(SCORE, h, high, total, slopes), tl.where(some, joint / slopes, 0.0)
    store_terms(TERMS + head * M, plane, rows, M, high, tl.where(some, rest, 0.0), delta)
    if ROW_SUMS is not None:
        of_power = _power_gradient(SCORE, h, total, delta, weighted, entropy, entropy_joint)
        tl.store(ROW_SUMS + head * M + rows, tl.where(some, of_power, 0.0), mask=rows < M)
