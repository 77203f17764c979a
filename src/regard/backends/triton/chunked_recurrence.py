"""Kernels of the linear recurrence, forward: states from chunk to chunk, then the outputs of all chunks at once.

With q and k after φ, S the state before a chunk of C tokens, and a_t the sum of its decays up to token t:

    o_t = (e^{a_t} q_t)ᵀ S + Σ_{j <= t} A_tj u_jᵀ            A_tj = Σ_d q_td k_jd e^{a_td - a_jd}
    S'  = e^{a_C} S + Σ_j (e^{a_C - a_j} k_j) u_jᵀ

u is v, or by the delta rule (Yang et al. 2024, arXiv 2406.06484, section 3.2; with decay arXiv 2412.06464)

    u = (I + β B)⁻¹ β (v - (e^a k) S)                        B_tj = Σ_d k_td k_jd e^{a_td - a_jd},  j < t

Where outputs are normalised, the total z is a column of S whose u is 1.

`chunk_states` goes over the chunks of a head, one program for a block of its state; the programs of the others have a
chunk each, and a block of features or values. Inputs are tuples as `decayed_chunk` has them, or None; all other memory
is contiguous. T is the dtype that factors of products are rounded to, PRECISION that of products of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decayed_chunk import (
    EXACT,
    TINY,
    add_products,
    at_head,
    chunk_factors,
    inverse_of_unit_lower,
    load_block,
    load_each,
    load_feature_decays,
    load_features,
    pair_factors,
    store_block,
)
from .score_tile import product, rounded


@triton.jit
def chunk_inverses(
    K, DECAY, BETA, INVERSE, key_heads, count, chunks,
    D: tl.constexpr, BD: tl.constexpr, PER_FEATURE: tl.constexpr, ELU: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(I + β B)⁻¹ of a chunk of a key head, (B, Hk, chunks, C, C), float32."""
    place = tl.cast(tl.program_id(0), tl.int64)
    head, first = place // chunks, tl.program_id(0) % chunks * C
    batch, number = head // key_heads, head % key_heads
    k_rows, decay_rows = at_head(K, batch, number), at_head(DECAY, batch, number)
    system = tl.zeros((C, C), tl.float32)
    for column in range(0, D, BD):
        k = load_features(k_rows, first, count, column, D, ELU, T, C, BD)
        decays = load_feature_decays(decay_rows, first, count, column, D, PER_FEATURE, C, BD)
        system = add_products(system, k, k, decays, T, PRECISION, C, LEVELS)
    beta = load_each(at_head(BETA, batch, number), first, count, C)
    system *= pair_factors(decay_rows, first, count, PER_FEATURE, C) * beta[:, None]
    inverse = inverse_of_unit_lower(system, C, LEVELS)
    store_block((INVERSE + place * C * C, C), inverse, 0, C, 0, C, C, C)


@triton.jit
def written(k_start, v, beta, INVERSE, state, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr):
    """u of the delta rule, (C, BV), from e^a k, (C, D), and the state before the chunk, (D, BV)."""
    known = product(rounded(k_start, T), rounded(state, T), None, PRECISION)
    inverse = load_block((INVERSE, C), 0, C, 0, C, 0.0, C, C)
    return product(inverse, beta[:, None] * (v.to(tl.float32) - known), None, EXACT)


@triton.jit
def chunk_states(
    K, V, DECAY, BETA, INVERSE, STATE, TOTAL, U, STATES, TOTALS, FINAL, FINAL_TOTAL, key_heads, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """S and z before each chunk and after the last, of a block (BD, BV); with the delta rule u of each token too.

    The delta rule needs all features in one block.
    """
    head, blocks = tl.cast(tl.program_id(0), tl.int64), tl.cdiv(DV, BV)
    batch, number = head // key_heads, head % key_heads
    row, column = tl.program_id(1) // blocks * BD, tl.program_id(1) % blocks * BV
    k_rows, v_rows = at_head(K, batch, number), at_head(V, batch, number)
    decay_rows, beta_rows = at_head(DECAY, batch, number), at_head(BETA, batch, number)
    feature = row + tl.arange(0, BD)
    stores_total = (feature < D) & (column == 0)
    state, total = tl.zeros((BD, BV), tl.float32), tl.zeros((BD,), tl.float32)
    if STATE is not None:
        state = load_block((STATE + head * D * DV, DV), row, D, column, DV, 0.0, BD, BV)
    if TOTAL is not None:
        total = tl.load(TOTAL + head * D + feature, mask=feature < D, other=0.0)
    for chunk in range(chunks):
        first, place = chunk * C, head * chunks + chunk
        store_block((STATES + place * D * DV, DV), state, row, D, column, DV, BD, BV)
        if TOTALS is not None:
            tl.store(TOTALS + place * D + feature, total, mask=stores_total)
        k = load_features(k_rows, first, count, row, D, ELU, T, C, BD)
        u = load_block(v_rows, first, count, column, DV, 0.0, C, BV)
        start, end, factor = chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
        if BETA is not None:
            beta = load_each(beta_rows, first, count, C)
            u = written(k * start, u, beta, INVERSE + place * C * C, state, T, PRECISION, C)
            store_block((U + head * count * DV, DV), u, first, count, column, DV, C, BV)
        state = product(tl.trans(rounded(k * end, T)), rounded(u, T), state * factor[:, None], PRECISION)
        total = total * factor + tl.sum(k * end, 0)
    store_block((FINAL + head * D * DV, DV), state, row, D, column, DV, BD, BV)
    if FINAL_TOTAL is not None:
        tl.store(FINAL_TOTAL + head * D + feature, total, mask=stores_total)


@triton.jit
def chunk_outputs(
    Q, K, U, DECAY, STATES, TOTALS, OUTPUT, ROW_TOTAL, key_heads, group, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The outputs of a chunk of a query head, BV columns of them, and what they were divided by."""
    head, first = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks * C
    column, key_head = tl.program_id(1) * BV, head // group
    batch, number, place = key_head // key_heads, key_head % key_heads, key_head * chunks + first // C
    q_rows, k_rows = at_head(Q, batch, head % (key_heads * group)), at_head(K, batch, number)
    decay_rows = at_head(DECAY, batch, number)
    weights, output = tl.zeros((C, C), tl.float32), tl.zeros((C, BV), tl.float32)
    row_total = tl.zeros((C,), tl.float32)
    for row in range(0, D, BD):
        q = load_features(q_rows, first, count, row, D, ELU, T, C, BD)
        k = load_features(k_rows, first, count, row, D, ELU, T, C, BD)
        decays = load_feature_decays(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
        weights = add_products(weights, q, k, decays, T, PRECISION, C, LEVELS)
        q *= chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)[0]
        state = load_block((STATES + place * D * DV, DV), row, D, column, DV, 0.0, BD, BV)
        output = product(rounded(q, T), rounded(state, T), output, PRECISION)
        if ROW_TOTAL is not None:
            feature = row + tl.arange(0, BD)
            total = tl.load(TOTALS + place * D + feature, mask=feature < D, other=0.0)
            row_total += tl.sum(q * total[None, :], 1)
    token = tl.arange(0, C)
    weights *= pair_factors(decay_rows, first, count, PER_FEATURE, C)
    weights = tl.where(token[None, :] <= token[:, None], weights, 0.0)
    u = load_block(at_head(U, batch, number), first, count, column, DV, 0.0, C, BV)
    output = product(rounded(weights, T), rounded(u, T), output, PRECISION)
    if ROW_TOTAL is not None:
        row_total += tl.sum(weights, 1)
        output = output / tl.where(tl.abs(row_total) >= TINY, row_total, float("inf"))[:, None]
        stores_total = (first + token < count) & (column == 0)
        tl.store(ROW_TOTAL + head * count + first + token, row_total, mask=stores_total)
    store_block((OUTPUT + head * count * DV, DV), output, first, count, column, DV, C, BV)
