"""Kernels of the linear recurrence, backward, from the states before each chunk, as `chunked_recurrence` writes them.

With do the gradient of the outputs before their division, dS' that of the state after a chunk, which comes from the last
chunk to the first, and dA_tj = do_t · u_j:

    dq_t = e^{a_t} S do_t + Σ_{j <= t} dA_tj e^{a_t - a_j} k_j
    dk_j = e^{a_C - a_j} dS' u_j + Σ_{t >= j} dA_tj e^{a_t - a_j} q_t
    du_j = e^{a_C - a_j} dS'ᵀ k_j + Σ_{t >= j} A_tj do_t
    dS   = e^{a_C} dS' + Σ_t (e^{a_t} q_t) do_tᵀ

u is v, or of the delta rule, where (I + β B) u = β (v - (e^a k) S): then x = (I + β B)⁻ᵀ du is the gradient of the right
side and -x uᵀ that of β B, so that

    dv = β x        dS -= (β e^a k)ᵀ x        dk_t -= β_t e^{a_t} S x_t, and more by B, as by A, in both its places

A decay g_s is in the exponents of all that goes from before s to s or beyond: of rows t >= s, and of keys j < s. Its
gradient is their sum of q · dq and k · dk, where pairs on one side of s add up to 0. Where outputs are normalised, z is a
column of S whose u is 1 and whose do is -(do · o).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .chunked_recurrence import written
from .decayed_chunk import (
    EXACT,
    add_products,
    at_head,
    chunk_factors,
    diagonal,
    features,
    load_block,
    load_each,
    load_feature_decays,
    load_features,
    load_raw,
    load_shares,
    pair_factors,
    pair_gradients,
    slopes,
    store_block,
    summed,
)
from .score_tile import product, rounded


@triton.jit
def total_gradients(
    GRAD_OUTPUT, OUTPUT, ROW_TOTAL, GRAD_ROW_TOTAL, key_heads, group, count, chunks,
    DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """-(do · o) / total, the gradient of the totals of the rows of a chunk of a query head, (B, H, N), float32."""
    head, first = tl.cast(tl.program_id(0) // chunks, tl.int64), tl.program_id(0) % chunks * C
    batch, number = head // (key_heads * group), head % (key_heads * group)
    above_rows, output_rows = at_head(GRAD_OUTPUT, batch, number), at_head(OUTPUT, batch, number)
    products = tl.zeros((C,), tl.float32)
    for column in range(0, DV, BV):
        above = load_block(above_rows, first, count, column, DV, 0.0, C, BV).to(tl.float32)
        output = load_block(output_rows, first, count, column, DV, 0.0, C, BV).to(tl.float32)
        products += tl.sum(above * output, 1)
    token = first + tl.arange(0, C)
    grad = -products * load_shares(ROW_TOTAL + head * count, first, count, C)
    tl.store(GRAD_ROW_TOTAL + head * count + token, grad, mask=token < count)


@triton.jit
def chunk_writes(
    K, V, DECAY, BETA, INVERSE, STATES, U, key_heads, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """u of the delta rule, of a chunk of a key head, BV columns of it, from the states that `chunk_states` wrote.

    All features are in one block.
    """
    place, column = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1) * BV
    head, first = place // chunks, tl.program_id(0) % chunks * C
    batch, number = head // key_heads, head % key_heads
    k = load_features(at_head(K, batch, number), first, count, 0, D, ELU, T, C, BD)
    k *= chunk_factors(at_head(DECAY, batch, number), first, count, 0, D, PER_FEATURE, C, BD)[0]
    v = load_block(at_head(V, batch, number), first, count, column, DV, 0.0, C, BV)
    beta = load_each(at_head(BETA, batch, number), first, count, C)
    state = load_block((STATES + place * D * DV, DV), 0, D, column, DV, 0.0, BD, BV)
    u = written(k, v, beta, INVERSE + place * C * C, state, T, PRECISION, C)
    store_block((U + head * count * DV, DV), u, first, count, column, DV, C, BV)


@triton.jit
def value_gradients(
    Q, K, DECAY, BETA, GRAD_OUTPUT, ROW_TOTAL, GRAD_STATES, GRAD_U, key_heads, group, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """du of a chunk of a key head, BV columns of it; with the delta rule all but dS'ᵀ k, which needs the chunk after."""
    place, column = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1) * BV
    head, first = place // chunks, tl.program_id(0) % chunks * C
    batch, number = head // key_heads, head % key_heads
    k_rows, decay_rows = at_head(K, batch, number), at_head(DECAY, batch, number)
    grad, token = tl.zeros((C, BV), tl.float32), tl.arange(0, C)
    if BETA is None:
        for row in range(0, D, BD):
            k = load_features(k_rows, first, count, row, D, ELU, T, C, BD)
            k *= chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)[1]
            above = load_block((GRAD_STATES + place * D * DV, DV), row, D, column, DV, 0.0, BD, BV)
            grad = product(rounded(k, T), rounded(above, T), grad, PRECISION)
    for member in range(group):
        q_rows, above_rows = at_head(Q, batch, number * group + member), at_head(GRAD_OUTPUT, batch, number * group + member)
        weights = tl.zeros((C, C), tl.float32)
        for row in range(0, D, BD):
            q = load_features(q_rows, first, count, row, D, ELU, T, C, BD)
            k = load_features(k_rows, first, count, row, D, ELU, T, C, BD)
            decays = load_feature_decays(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
            weights = add_products(weights, q, k, decays, T, PRECISION, C, LEVELS)
        weights *= pair_factors(decay_rows, first, count, PER_FEATURE, C)
        weights = tl.where(token[None, :] <= token[:, None], weights, 0.0)
        if ROW_TOTAL is not None:
            weights *= load_shares(ROW_TOTAL + (head * group + member) * count, first, count, C)[:, None]
        above = load_block(above_rows, first, count, column, DV, 0.0, C, BV)
        grad = product(tl.trans(rounded(weights, T)), rounded(above, T), grad, PRECISION)
    store_block((GRAD_U + head * count * DV, DV), grad, first, count, column, DV, C, BV)


@triton.jit
def state_gradients(
    Q, K, DECAY, BETA, INVERSE, GRAD_OUTPUT, ROW_TOTAL, GRAD_ROW_TOTAL, GRAD_FINAL, GRAD_FINAL_TOTAL,
    GRAD_U, GRAD_STATES, GRAD_TOTALS, GRAD_STATE, GRAD_TOTAL, key_heads, group, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dS' of each chunk and the gradient of the first state, of a block (BD, BV); with the delta rule x, instead of du.

    The delta rule needs all features in one block.
    """
    head, blocks = tl.cast(tl.program_id(0), tl.int64), tl.cdiv(DV, BV)
    batch, number = head // key_heads, head % key_heads
    row, column = tl.program_id(1) // blocks * BD, tl.program_id(1) % blocks * BV
    k_rows, decay_rows = at_head(K, batch, number), at_head(DECAY, batch, number)
    beta_rows, u_rows = at_head(BETA, batch, number), (GRAD_U + head * count * DV, DV)
    feature = row + tl.arange(0, BD)
    stores_total = (feature < D) & (column == 0)
    grad, grad_total = tl.zeros((BD, BV), tl.float32), tl.zeros((BD,), tl.float32)
    if GRAD_FINAL is not None:
        grad = load_block((GRAD_FINAL + head * D * DV, DV), row, D, column, DV, 0.0, BD, BV)
    if GRAD_FINAL_TOTAL is not None:
        grad_total = tl.load(GRAD_FINAL_TOTAL + head * D + feature, mask=feature < D, other=0.0)
    for step in range(chunks):
        place = head * chunks + chunks - 1 - step
        first = (chunks - 1 - step) * C
        store_block((GRAD_STATES + place * D * DV, DV), grad, row, D, column, DV, BD, BV)
        if GRAD_TOTALS is not None:
            tl.store(GRAD_TOTALS + place * D + feature, grad_total, mask=stores_total)
        start, end, factor = chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
        before, grad_total = grad * factor[:, None], grad_total * factor
        for member in range(group):
            q_rows = at_head(Q, batch, number * group + member)
            above_rows = at_head(GRAD_OUTPUT, batch, number * group + member)
            q = load_features(q_rows, first, count, row, D, ELU, T, C, BD) * start
            above = load_block(above_rows, first, count, column, DV, 0.0, C, BV)
            if ROW_TOTAL is not None:
                offset = (head * group + member) * count
                grad_total += tl.sum(q * load_each((GRAD_ROW_TOTAL + offset, 1), first, count, C)[:, None], 0)
                q *= load_shares(ROW_TOTAL + offset, first, count, C)[:, None]
            before = product(tl.trans(rounded(q, T)), rounded(above, T), before, PRECISION)
        if BETA is not None:
            k = load_features(k_rows, first, count, row, D, ELU, T, C, BD)
            du = load_block(u_rows, first, count, column, DV, 0.0, C, BV).to(tl.float32)
            du = product(rounded(k * end, T), rounded(grad, T), du, PRECISION)
            inverse = load_block((INVERSE + place * C * C, C), 0, C, 0, C, 0.0, C, C)
            x = product(tl.trans(inverse), du, None, EXACT)
            store_block(u_rows, x, first, count, column, DV, C, BV)
            k *= start * -load_each(beta_rows, first, count, C)[:, None]
            before = product(tl.trans(rounded(k, T)), rounded(x, T), before, PRECISION)
        grad = before
    store_block((GRAD_STATE + head * D * DV, DV), grad, row, D, column, DV, BD, BV)
    if GRAD_TOTAL is not None:
        tl.store(GRAD_TOTAL + head * D + feature, grad_total, mask=stores_total)


@triton.jit
def load_state_products(
    U, X, V, STATES, GRAD_STATES, row, first, count,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, DECAYS: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums over the values: u dS'ᵀ and -x Sᵀ, (C, BD); -x uᵀ, (C, C); x · v, (C,); and S · dS', (BD,).

    Of X None and without decays, zeros.
    """
    of_keys = tl.zeros((C, BD), tl.float32)
    of_rows, of_pairs = of_keys, tl.zeros((C, C), tl.float32)
    of_beta, of_states = tl.zeros((C,), tl.float32), tl.zeros((BD,), tl.float32)
    for column in range(0, DV, BV):
        u = load_block(U, first, count, column, DV, 0.0, C, BV)
        above = load_block((GRAD_STATES, DV), row, D, column, DV, 0.0, BD, BV)
        of_keys = product(rounded(u, T), tl.trans(rounded(above, T)), of_keys, PRECISION)
        if DECAYS or X is not None:
            state = load_block((STATES, DV), row, D, column, DV, 0.0, BD, BV)
            of_states += tl.sum(state * above, 1)
        if X is not None:
            x = load_block((X, DV), first, count, column, DV, 0.0, C, BV).to(tl.float32)
            of_rows = product(rounded(-x, T), tl.trans(rounded(state, T)), of_rows, PRECISION)
            of_pairs = product(rounded(-x, T), tl.trans(rounded(u, T)), of_pairs, PRECISION)
            of_beta += tl.sum(x * load_block(V, first, count, column, DV, 0.0, C, BV).to(tl.float32), 1)
    return of_keys, of_rows, of_pairs, of_beta, of_states


@triton.jit
def load_row_products(
    GRAD_OUTPUT, U, STATES, row, first, count,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums over the values: do Sᵀ, (C, BD), and do uᵀ, (C, C)."""
    of_rows, of_pairs = tl.zeros((C, BD), tl.float32), tl.zeros((C, C), tl.float32)
    for column in range(0, DV, BV):
        above = load_block(GRAD_OUTPUT, first, count, column, DV, 0.0, C, BV)
        u = load_block(U, first, count, column, DV, 0.0, C, BV)
        state = load_block((STATES, DV), row, D, column, DV, 0.0, BD, BV)
        of_rows = product(rounded(above, T), tl.trans(rounded(state, T)), of_rows, PRECISION)
        of_pairs = product(rounded(above, T), tl.trans(rounded(u, T)), of_pairs, PRECISION)
    return of_rows, of_pairs


@triton.jit
def store_decay_gradients(
    GRAD_DECAY, from_rows, from_keys, from_states, row, first, count,
    D: tl.constexpr, PER_FEATURE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Σ_{t >= s} from_rows_t + Σ_{j < s} from_keys_j + from_states, of each feature or their sum over these features."""
    s, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if PER_FEATURE:
        grad = summed(token >= s, from_rows) + summed(token < s, from_keys) + from_states[None, :]
        store_block((GRAD_DECAY, D), grad, first, count, row, D, C, BD)
    else:
        each = tl.where(token >= s, tl.sum(from_rows, 1)[None, :], tl.sum(from_keys, 1)[None, :])
        at = first + tl.arange(0, C)
        tl.store(GRAD_DECAY + at, tl.sum(each, 1) + tl.sum(from_states, 0), mask=at < count)


@triton.jit
def query_key_gradients(
    Q, K, V, U, X, DECAY, BETA, STATES, TOTALS, GRAD_OUTPUT, ROW_TOTAL, GRAD_ROW_TOTAL, GRAD_STATES, GRAD_TOTALS,
    GRAD_Q, GRAD_K, GRAD_DECAY, GRAD_BETA, key_heads, group, rows, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq, dk and the gradients of the gates, of a chunk of a key head and BD features.

    The gradients of gates with one number for all features are sums over these BD: (blocks, B, Hk, N).
    """
    place, block = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    head, first, row = place // chunks, tl.program_id(0) % chunks * C, block * BD
    batch, number = head // key_heads, head % key_heads
    feature, token = row + tl.arange(0, BD), first + tl.arange(0, C)
    decay_rows, u_rows = at_head(DECAY, batch, number), at_head(U, batch, number)
    x_rows, STATES, GRAD_STATES = X, STATES + place * D * DV, GRAD_STATES + place * D * DV
    if X is not None:
        x_rows = X + head * count * DV
    raw = load_raw(at_head(K, batch, number), first, count, row, D, ELU, C, BD)
    k, slope = features(raw, ELU, T), slopes(raw, ELU)
    decays = load_feature_decays(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
    start, end, factor = chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
    pairs = pair_factors(decay_rows, first, count, PER_FEATURE, C)
    grad_k, above_k, above_pairs, grad_beta, from_states = load_state_products(
        u_rows, x_rows, at_head(V, batch, number), STATES, GRAD_STATES, row, first, count,
        D, DV, BD, BV, DECAY is not None, T, PRECISION, C,
    )  # fmt: skip
    total = tl.zeros((BD,), tl.float32)
    if ROW_TOTAL is not None:
        total = tl.load(TOTALS + place * D + feature, mask=feature < D, other=0.0)
        grad_total = tl.load(GRAD_TOTALS + place * D + feature, mask=feature < D, other=0.0)
        grad_k, from_states = grad_k + grad_total[None, :], from_states + grad_total * total
    grad_k *= end
    from_keys, from_rows = k * grad_k, tl.zeros((C, BD), tl.float32)
    if BETA is not None:
        beta = load_each(at_head(BETA, batch, number), first, count, C)
        of_rows, of_keys = pair_gradients(above_pairs, pairs, k * beta[:, None], k, decays, T, PRECISION, C, LEVELS)
        of_rows += start * above_k
        grad_beta = tl.where(block == 0, grad_beta, 0.0) + tl.sum(k * of_rows, 1)
        tl.store(GRAD_BETA + (block * rows + head) * count + token, grad_beta, mask=token < count)
        of_rows *= beta[:, None]
        grad_k += of_rows + of_keys
        from_rows = k * (of_rows - of_keys)
    for member in range(group):
        offset = head * group + member
        above_rows = at_head(GRAD_OUTPUT, batch, number * group + member)
        raw_q = load_raw(at_head(Q, batch, number * group + member), first, count, row, D, ELU, C, BD)
        q = features(raw_q, ELU, T)
        above_q, above_pairs = load_row_products(
            above_rows, u_rows, STATES, row, first, count, D, DV, BD, BV, T, PRECISION, C
        )
        if ROW_TOTAL is not None:
            shares = load_shares(ROW_TOTAL + offset * count, first, count, C)
            above_total = load_each((GRAD_ROW_TOTAL + offset * count, 1), first, count, C)[:, None]
            above_q = above_q * shares[:, None] + above_total * total[None, :]
            above_pairs = above_pairs * shares[:, None] + above_total
        of_rows, of_keys = pair_gradients(above_pairs, pairs, q, k, decays, T, PRECISION, C, LEVELS)
        grad_q, itself = start * above_q + of_rows, tl.sum(diagonal(above_pairs, C), 1)[:, None]
        from_rows += q * grad_q - k * of_keys
        grad_q, grad_k = (grad_q + itself * k) * slopes(raw_q, ELU), grad_k + of_keys + itself * q
        store_block((GRAD_Q + offset * count * D, D), grad_q, first, count, row, D, C, BD)
    store_block((GRAD_K + head * count * D, D), grad_k * slope, first, count, row, D, C, BD)
    if DECAY is not None:
        at = GRAD_DECAY + (head * count * D if PER_FEATURE else (block * rows + head) * count)
        store_decay_gradients(at, from_rows, from_keys, from_states * factor, row, first, count, D, PER_FEATURE, C, BD)
