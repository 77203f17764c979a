"""Kernels of the linear recurrence, backward, from the states before each chunk, as `chunked_recurrence` writes them.

With do the gradient of the outputs before their division, dS' that of the state after a chunk, which goes from the last
chunk to the first, and dA_tj = do_t · u_j:

    dq_t = e^{a_t} S do_t + Σ_{j <= t} dA_tj e^{a_t - a_j} k_j
    dk_j = e^{a_C - a_j} dS' u_j + Σ_{t >= j} dA_tj e^{a_t - a_j} q_t
    du_j = e^{a_C - a_j} dS'ᵀ k_j + Σ_{t >= j} A_tj do_t
    dS   = e^{a_C} dS' + Σ_t (e^{a_t} q_t) do_tᵀ

u is v, or of the delta rule, where (I + β B) u = β (v - (e^a k) S): then x = (I + β B)⁻ᵀ du is the gradient of the
right side and -x uᵀ that of β B, so that

    dv = β x        dS -= (β e^a k)ᵀ x        dk_t -= β_t e^{a_t} S x_t, and more by B, as by A, in both its places

A decay g_s is in the exponents of all that goes from before s to s or beyond: of rows t >= s, and of keys j < s. Its
gradient is their sum of q · dq and k · dk, where pairs on one side of s add up to 0. Where outputs are normalised, z is
a column of S whose u is 1 and whose do is -(do · o).
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
    key_gradients,
    load_block,
    load_each,
    load_feature_decays,
    load_features,
    load_shares,
    pair_factors,
    row_gradients,
    store_block,
    summed,
    times_slopes,
)
from .score_tile import product, rounded


@triton.jit
def weight_gradients(
    U, DECAY, GRAD_OUTPUT, OUTPUT, ROW_TOTAL, WEIGHTS, GRAD_ROW_TOTAL, key_heads, group, count, chunks,
    DV: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dA of a chunk of a query head, times e^{a_t - a_j} of one decay for all features: (B, H, chunks, C, C), of T.

    Where outputs are normalised, also the gradients of the totals of their rows, -(do · o) / total, (B, H, N).
    """
    place = tl.cast(tl.program_id(0), tl.int64)
    head, first = place // chunks, tl.program_id(0) % chunks * C
    key_head = head // group
    batch, number, row = key_head // key_heads, key_head % key_heads, head % (key_heads * group)
    above_rows, u_rows = at_head(GRAD_OUTPUT, batch, row), at_head(U, batch, number)
    weights, products = tl.zeros((C, C), tl.float32), tl.zeros((C,), tl.float32)
    for column in range(0, DV, BV):
        above = load_block(above_rows, first, count, column, DV, 0.0, C, BV)
        u = load_block(u_rows, first, count, column, DV, 0.0, C, BV)
        weights = product(rounded(above, T), tl.trans(rounded(u, T)), weights, PRECISION)
        if ROW_TOTAL is not None:
            output = load_block(at_head(OUTPUT, batch, row), first, count, column, DV, 0.0, C, BV)
            products += tl.sum(above.to(tl.float32) * output.to(tl.float32), 1)
    if ROW_TOTAL is not None:
        shares, token = load_shares(ROW_TOTAL + head * count, first, count, C), first + tl.arange(0, C)
        tl.store(GRAD_ROW_TOTAL + head * count + token, -products * shares, mask=token < count)
        weights = (weights - products[:, None]) * shares[:, None]
    weights *= pair_factors(at_head(DECAY, batch, number), first, count, PER_FEATURE, C)
    store_block((WEIGHTS + place * C * C, C), weights, 0, C, 0, C, C, C)


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
    """du of a chunk of a key head, BV columns of it; with the delta rule without dS'ᵀ k, of the chunk after."""
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
        q_rows, above_rows = (
            at_head(Q, batch, number * group + member),
            at_head(GRAD_OUTPUT, batch, number * group + member),
        )
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
def load_weights(WEIGHTS, STRICT: tl.constexpr, C: tl.constexpr):
    """What `weight_gradients` stored of a chunk, (C, C); STRICT: without its diagonal."""
    weights = load_block((WEIGHTS, C), 0, C, 0, C, 0.0, C, C)
    if STRICT:
        weights -= diagonal(weights, C)
    return weights


@triton.jit
def of_gate(x, PER_FEATURE: tl.constexpr):
    """The sum of x, (C, BD), over what shares a decay: (C,), or x where each feature has its own."""
    if PER_FEATURE:
        return x
    else:
        return tl.sum(x, 1)


@triton.jit
def query_gradients(
    Q, K, DECAY, STATES, TOTALS, GRAD_OUTPUT, ROW_TOTAL, GRAD_ROW_TOTAL, WEIGHTS, GRAD_Q, FROM_ROWS,
    key_heads, group, rows, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dq of a chunk of a query head and BD features, and for decays q · dq without the pairs j = t.

    The latter is (B, H, N, D), or of one decay for all features a sum over these BD, (blocks, B, H, N).
    """
    place, block = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    head, first, row = place // chunks, tl.program_id(0) % chunks * C, block * BD
    key_head = head // group
    batch, number, query_number = key_head // key_heads, key_head % key_heads, head % (key_heads * group)
    before = key_head * chunks + first // C
    decay_rows, above_rows = at_head(DECAY, batch, number), at_head(GRAD_OUTPUT, batch, query_number)
    grad = tl.zeros((C, BD), tl.float32)
    for column in range(0, DV, BV):
        above = load_block(above_rows, first, count, column, DV, 0.0, C, BV)
        state = load_block((STATES + before * D * DV, DV), row, D, column, DV, 0.0, BD, BV)
        grad = product(rounded(above, T), tl.trans(rounded(state, T)), grad, PRECISION)
    if ROW_TOTAL is not None:
        feature = row + tl.arange(0, BD)
        total = tl.load(TOTALS + before * D + feature, mask=feature < D, other=0.0)
        above_total = load_each((GRAD_ROW_TOTAL + head * count, 1), first, count, C)
        grad *= load_shares(ROW_TOTAL + head * count, first, count, C)[:, None]
        grad += above_total[:, None] * total[None, :]
    grad *= chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)[0]
    q = load_features(at_head(Q, batch, query_number), first, count, row, D, ELU, T, C, BD)
    k = load_features(at_head(K, batch, number), first, count, row, D, ELU, T, C, BD)
    decays = load_feature_decays(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
    weights = load_weights(WEIGHTS + place * C * C, DECAY is not None, C)
    grad += row_gradients(weights, k, decays, T, PRECISION, C, LEVELS)
    if DECAY is not None:
        products, token = of_gate(q * grad, PER_FEATURE), first + tl.arange(0, C)
        if PER_FEATURE:
            store_block((FROM_ROWS + head * count * D, D), products, first, count, row, D, C, BD)
        else:
            tl.store(FROM_ROWS + (block * rows * group + head) * count + token, products, mask=token < count)
        grad += k * load_each((WEIGHTS + place * C * C, C + 1), 0, C, C)[:, None].to(tl.float32)
    store_block((GRAD_Q + head * count * D, D), times_slopes(grad, q, ELU), first, count, row, D, C, BD)


@triton.jit
def load_key_products(
    ROWS, MATRICES, row, first, count,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sums over the values, (C, BD), of rows (N, DV) and a state or its gradient, (D, DV)."""
    sums = tl.zeros((C, BD), tl.float32)
    for column in range(0, DV, BV):
        x = load_block(ROWS, first, count, column, DV, 0.0, C, BV)
        matrix = load_block((MATRICES, DV), row, D, column, DV, 0.0, BD, BV)
        sums = product(rounded(x, T), tl.trans(rounded(matrix, T)), sums, PRECISION)
    return sums


@triton.jit
def load_sums_of_products(X, Y, first, count, DV: tl.constexpr, R: tl.constexpr, BV: tl.constexpr):
    """The sums of the products of rows of X and Y, (R,)."""
    sums = tl.zeros((R,), tl.float32)
    for column in range(0, DV, BV):
        x = load_block(X, first, count, column, DV, 0.0, R, BV).to(tl.float32)
        sums += tl.sum(x * load_block(Y, first, count, column, DV, 0.0, R, BV).to(tl.float32), 1)
    return sums


@triton.jit
def store_decay_gradients(
    GRAD_DECAY, from_rows, from_keys, from_states, row, first, count,
    D: tl.constexpr, PER_FEATURE: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Σ_{t >= s} from_rows_t + Σ_{j < s} from_keys_j + from_states, (C, BD), or (C,) of one decay for all features."""
    s, token = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    if PER_FEATURE:
        grad = summed(token >= s, from_rows) + summed(token < s, from_keys) + from_states[None, :]
        store_block((GRAD_DECAY, D), grad, first, count, row, D, C, BD)
    else:
        grad = tl.sum(tl.where(token >= s, from_rows[None, :], from_keys[None, :]), 1) + tl.sum(from_states, 0)
        at = first + tl.arange(0, C)
        tl.store(GRAD_DECAY + at, grad, mask=at < count)


@triton.jit
def key_and_gate_gradients(
    Q, K, V, U, X, DECAY, BETA, STATES, TOTALS, WEIGHTS, SYSTEM_WEIGHTS, FROM_ROWS, GRAD_STATES, GRAD_TOTALS,
    GRAD_K, GRAD_DECAY, GRAD_BETA, key_heads, group, rows, count, chunks,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, PER_FEATURE: tl.constexpr,
    ELU: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """dk and the gradients of the gates, of a chunk of a key head and BD features.

    The gradients of gates with one number for all features are sums over these BD: (blocks, B, Hk, N).
    """
    place, block = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    head, first, row = place // chunks, tl.program_id(0) % chunks * C, block * BD
    batch, number = head // key_heads, head % key_heads
    feature, token = row + tl.arange(0, BD), first + tl.arange(0, C)
    decay_rows, matrix = at_head(DECAY, batch, number), place * D * DV
    k = load_features(at_head(K, batch, number), first, count, row, D, ELU, T, C, BD)
    decays = load_feature_decays(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
    start, end, factor = chunk_factors(decay_rows, first, count, row, D, PER_FEATURE, C, BD)
    u_rows, above = at_head(U, batch, number), GRAD_STATES + matrix
    grad = load_key_products(u_rows, above, row, first, count, D, DV, BD, BV, T, PRECISION, C)
    if TOTALS is not None:
        grad += tl.load(GRAD_TOTALS + place * D + feature, mask=feature < D, other=0.0)[None, :]
    grad *= end
    from_keys, from_rows = of_gate(k * grad, PER_FEATURE), tl.zeros((C,), tl.float32)
    if PER_FEATURE:
        from_rows = tl.zeros((C, BD), tl.float32)
    if BETA is not None:
        beta = load_each(at_head(BETA, batch, number), first, count, C)
        x_rows = (X + head * count * DV, DV)
        of_rows = start * load_key_products(x_rows, STATES + matrix, row, first, count, D, DV, BD, BV, T, PRECISION, C)
        weights = load_weights(SYSTEM_WEIGHTS + place * C * C, True, C)
        of_rows += row_gradients(weights, k, decays, T, PRECISION, C, LEVELS)
        of_keys = key_gradients(weights, k * beta[:, None], decays, T, PRECISION, C, LEVELS)
        grad_beta = -tl.sum(k * of_rows, 1)
        if block == 0:
            grad_beta += load_sums_of_products(x_rows, at_head(V, batch, number), first, count, DV, C, BV)
        tl.store(GRAD_BETA + (block * rows + head) * count + token, grad_beta, mask=token < count)
        of_rows *= beta[:, None]
        grad -= of_rows + of_keys
        from_rows += of_gate(k * (of_keys - of_rows), PER_FEATURE)
    for member in range(group):
        offset = head * group + member
        q = load_features(at_head(Q, batch, number * group + member), first, count, row, D, ELU, T, C, BD)
        at = WEIGHTS + (offset * chunks + first // C) * C * C
        of_keys = key_gradients(load_weights(at, DECAY is not None, C), q, decays, T, PRECISION, C, LEVELS)
        grad += of_keys
        if DECAY is not None:
            if PER_FEATURE:
                from_rows += load_block((FROM_ROWS + offset * count * D, D), first, count, row, D, 0.0, C, BD)
            else:
                from_rows += load_each((FROM_ROWS + offset * count, 1), first, tl.where(block == 0, count, 0), C)
            from_rows -= of_gate(k * of_keys, PER_FEATURE)
            grad += q * load_each((at, C + 1), 0, C, C)[:, None].to(tl.float32)
    store_block((GRAD_K + head * count * D, D), times_slopes(grad, k, ELU), first, count, row, D, C, BD)
    if DECAY is not None:
        from_states = load_sums_of_products((STATES + matrix, DV), (above, DV), row, D, DV, BD, BV)
        if TOTALS is not None:
            total = tl.load(TOTALS + place * D + feature, mask=feature < D, other=0.0)
            from_states += total * tl.load(GRAD_TOTALS + place * D + feature, mask=feature < D, other=0.0)
        at = GRAD_DECAY + (head * count * D if PER_FEATURE else (block * rows + head) * count)
        store_decay_gradients(at, from_rows, from_keys, from_states * factor, row, first, count, D, PER_FEATURE, C, BD)
