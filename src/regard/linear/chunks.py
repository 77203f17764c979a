"""The recurrence of causal linear attention, computed in chunks: matrix products within, states between them.

    S_t = e^{g_t} S_{t-1} + k_t u_tᵀ,   o_t = S_tᵀ q_t,   u_t = v_t  or  β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t)

Within a chunk, with a_t = g_1 + ... + g_t counted from its start and S the state before it (Yang et al. 2024,
arXiv 2312.06635, section 4; the delta rule arXiv 2406.06484, section 3.2, and with decay arXiv 2412.06464):

    o_t = (e^{a_t} q_t)ᵀ S + Σ_{j <= t} A_tj u_jᵀ            A_tj = Σ_d q_td k_jd e^{a_td - a_jd}
    u = (I + β B)⁻¹ β (v - (e^a r) S)                        B_tj = Σ_d r_td k_jd e^{a_td - a_jd},  j < t
    S' = e^{a_C} S + Σ_j (e^{a_C - a_j} k_j) u_jᵀ

The key r whose value is removed is k unless it is given, as by Hatamizadeh et al. 2026 (arXiv 2605.22791).
No exponent is above 0, so that nothing overflows, whatever the decay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
"""Positions of a chunk: its weights are then as large as its keys and values."""
SMALLEST_DECAY = -1000.0
"""e to this is 0 in every dtype; lower decays, -inf among them, are computed as this."""


def advance(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    removal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and final state by differentiable operations, with memory for all chunks; shapes as in `recurrence`."""
    (batch, heads, length), key_heads, value_dim = query.shape[:3], key.shape[1], value.shape[-1]
    if not length or not query.numel() or not value.numel():
        return value.new_zeros(batch, heads, length, value_dim), _decayed_state(decay, state)
    if length == 1:
        return _one_step(query, key, value, decay, beta, state, removal)
    size = min(CHUNK, 1 << (length - 1).bit_length())
    q = in_chunks(query.unflatten(1, (key_heads, heads // key_heads)), size).transpose(2, 3)  # (B, Hk, m, r, C, D)
    k, v = in_chunks(key, size), in_chunks(value, size)  # (B, Hk, m, C, D), (B, Hk, m, C, Dv)
    sums = None if decay is None else _cumulative(decay, size)  # (B, Hk, m, C, 1 or D), float64
    from_start = None if sums is None else sums.exp().to(k.dtype)
    k_end = k if sums is None else k * (sums[..., -1:, :] - sums).exp().to(k.dtype)
    factor = None if from_start is None else from_start[..., -1, :, None]  # (B, Hk, m, 1 or D, 1)
    if beta is None:
        u, (states, final) = v, _scan(factor, k_end.mT @ v, state)
    else:
        r = k if removal is None else in_chunks(removal, size)
        r_start = r if from_start is None else r * from_start
        system = in_chunks(beta[..., None], size) * decayed_products(r, k, sums).tril(-1)
        right = in_chunks(beta[..., None], size) * torch.cat([v, r_start], -1)
        u, states, final = _delta_scan(factor, system, right, k_end, state)
    weights = decayed_products(q, k.unsqueeze(3), None if sums is None else sums.unsqueeze(3))  # (B, Hk, m, r, C, C)
    q_start = q if from_start is None else q * from_start.unsqueeze(3)
    # The heads of a group are rows of one product.
    output = q_start.flatten(3, 4) @ states + weights.flatten(3, 4) @ u  # (B, Hk, m, r·C, Dv)
    output = output.unflatten(3, (heads // key_heads, size)).transpose(2, 3)  # (B, Hk, r, m, C, Dv)
    output = output.reshape(batch, heads, output.shape[3] * size, value_dim)
    return output[:, :, :length], final


def _decayed_state(decay: Tensor | None, state: Tensor) -> Tensor:
    """The state after keys or values without entries: decay alone acts on it."""
    if decay is None or not decay.numel():
        return state
    return state * decay.sum(2).exp()[(..., None) if decay.ndim == 4 else (..., None, None)]


def _one_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    removal: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The recurrence of one position, as in decoding."""
    if decay is not None:
        state = state * decay.exp().squeeze(2)[(..., None) if decay.ndim == 4 else (..., None, None)]
    if beta is not None:
        value = beta[..., None] * (value - (key if removal is None else removal) @ state)  # (B, Hk, 1, Dv)
    state = torch.addcmul(state, key.mT, value)  # (B, Hk, D, Dv), with no copy of the outer product
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # (B, Hk, r, D)
    return (rows @ state).flatten(1, 2).unsqueeze(2), state


def in_chunks(tensor: Tensor, size: int) -> Tensor:
    """(..., N, d) to (..., m, size, d), with zeros at the end, which change no state."""
    tensor = functional.pad(tensor, (0, 0, 0, -tensor.shape[-2] % size))
    return tensor.unflatten(-2, (-1, size))


def _cumulative(decay: Tensor, size: int) -> Tensor:
    """Sums of the decay from the start of each chunk: (B, Hk, m, size, 1 or D).

    In float64, since the difference of two large sums may be small.
    """
    if decay.ndim == 3:
        decay = decay[..., None]
    return in_chunks(decay.clamp(min=SMALLEST_DECAY).double(), size).cumsum(-2)


def decayed_products(rows: Tensor, keys: Tensor, sums: Tensor | None) -> Tensor:
    """A_tj = Σ_d rows_td keys_jd e^{a_td - a_jd} for j <= t, 0 for j > t, in each chunk.

    Shapes: rows (..., C, D), keys and sums (..., C, D) that broadcast to it, sums (..., C, 1) for one decay of all
    features; A (..., C, C), C a power of 2.
    """
    size = rows.shape[-2]
    if sums is None:
        return (rows @ keys.mT).tril()
    if sums.shape[-1] == 1:
        ones = torch.ones(size, size, dtype=torch.bool, device=rows.device)
        exponents = (sums - sums.mT).masked_fill(~ones.tril(), -torch.inf).to(rows.dtype)
        return (rows @ keys.mT) * exponents.exp()
    # Blocks of two halves: each pair of a row in the second and a key in the first decays by way of the end of the
    # first half, e^{a_t - a_end} e^{a_end - a_j}. Blocks start as single positions and double.
    blocks = (rows * keys).sum(-1)[..., None, None]  # (..., C, 1, 1)
    half = 1
    while half < size:
        r, k, a = (tensor.unflatten(-2, (-1, 2, half)) for tensor in (rows, keys, sums))  # (..., C / 2h, 2, h, D)
        a_end = a[..., 0, -1:, :]
        r = r[..., 1, :, :] * (a[..., 1, :, :] - a_end).exp().to(rows.dtype)
        k = k[..., 0, :, :] * (a_end - a[..., 0, :, :]).exp().to(rows.dtype)
        below = r @ k.mT  # (..., C / 2h, h, h)
        first, second = blocks.unflatten(-3, (-1, 2)).unbind(-3)
        top = torch.cat([first, torch.zeros_like(first)], -1)
        blocks = torch.cat([top, torch.cat([below, second], -1)], -2)
        half *= 2
    return blocks.squeeze(-3)


def _scan(factor: Tensor | None, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_{c+1} = factor_c S_c + added_c: the states before each chunk, (B, Hk, m, D, Dv), and the final one."""
    if factor is None:
        sums = torch.cat([state.unsqueeze(2), added], 2).cumsum(2)
        return sums[:, :, :-1], sums[:, :, -1]
    states = [state]
    for c in range(added.shape[2]):
        states.append(factor[:, :, c] * states[-1] + added[:, :, c])
    return torch.stack(states[:-1], 2), states[-1]


def _delta_scan(
    factor: Tensor | None, system: Tensor, right: Tensor, k_end: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The u of the delta rule, (B, Hk, m, C, Dv), the states before each chunk, and the final one.

    system: β B, strictly lower, (B, Hk, m, C, C). right: β v beside β e^a r, (B, Hk, m, C, Dv + D).
    """
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split([state.shape[-1], state.shape[-2]], -1)
    corrected, states = [], [state]
    for c in range(right.shape[2]):
        corrected.append(values[:, :, c] - keys[:, :, c] @ states[-1])
        kept = states[-1] if factor is None else factor[:, :, c] * states[-1]
        states.append(kept + k_end[:, :, c].mT @ corrected[-1])
    return torch.stack(corrected, 2), torch.stack(states[:-1], 2), states[-1]
