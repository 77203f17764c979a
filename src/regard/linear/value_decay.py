"""Linear attention whose state decays along the values, in place of the features: one decay for each value dim.

    S_t = S_{t-1} diag(e^{g_t}) + k_t v_tᵀ,   o_t = S_tᵀ q_t

Within a chunk, with a_t = g_1 + ... + g_t counted from its start and S the state before it:

    o_t = e^{a_t} ⊙ (Sᵀ q_t) + Σ_{j <= t} (q_t · k_j) e^{a_t - a_j} ⊙ v_j
    S' = S diag(e^{a_C}) + Σ_j k_j (e^{a_C - a_j} ⊙ v_j)ᵀ

No exponent is above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import CHUNK, SMALLEST_DECAY, in_chunks
from .linear_arguments import check_logarithms, has_values

MOST_DECAYED = 40.0
"""The largest a for which numbers are divided by e^-a: e^40 times a number and back is the number, to rounding."""
FEW = 16
"""Positions whose pairs are computed at once: as many numbers for each value dim as there are pairs."""


def read_decaying_values(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """o_t = S_tᵀ q_t of all positions, (B, H, N, Dv), by differentiable operations in memory linear in N.

    Shapes: query (B, H, N, D), key (B, Hk, N, D), value and decay (B, Hk, N, Dv).

    Raises:
        ConfigurationError: a decay above 0.
    """
    check_logarithms(decay)
    length, key_heads = query.shape[2], key.shape[1]
    if not query.numel() or not value.numel():
        return value.new_zeros(*query.shape[:3], value.shape[-1])
    size = min(CHUNK, 1 << (length - 1).bit_length())
    q = in_chunks(query, size).unflatten(1, (key_heads, -1))  # (B, Hk, r, m, C, D)
    k, v = in_chunks(key, size), in_chunks(value, size)  # (B, Hk, m, C, ·)
    sums = in_chunks(decay.clamp(min=SMALLEST_DECAY).double(), size).cumsum(-2)  # (B, Hk, m, C, Dv)
    rows = _decayed_sums((q @ k.mT.unsqueeze(2)), v.unsqueeze(2), sums.unsqueeze(2))
    if k.shape[2] > 1:
        added = k.mT @ (v * (sums[..., -1:, :] - sums).exp().to(v.dtype))  # (B, Hk, m, D, Dv)
        states = _states(sums[..., -1:, :].exp().to(v.dtype), added)
        rows = rows + (q @ states.unsqueeze(2)) * sums.exp().to(v.dtype).unsqueeze(2)
    return rows.flatten(3, 4).flatten(1, 2)[:, :, :length]


def _states(factor: Tensor, added: Tensor) -> Tensor:
    """S_{c+1} = S_c factor_c + added_c from S_0 = 0: the states before each chunk, as added, (B, Hk, m, D, Dv)."""
    states = [torch.zeros_like(added[:, :, 0])]
    for c in range(added.shape[2] - 1):
        states.append(torch.addcmul(added[:, :, c], states[-1], factor[:, :, c]))
    return torch.stack(states, 2)


def _decayed_sums(weights: Tensor, values: Tensor, sums: Tensor) -> Tensor:
    """Σ_{j <= t} w_tj e^{a_t - a_j} ⊙ v_j in each chunk.

    Each pair of a row in the second half of a block and a value in the first decays by way of the end of the first
    half, e^{a_t - a_end} e^{a_end - a_j}. Blocks start as single positions and double. Where no decay within a
    chunk is below e^-MOST_DECAYED, it is e^{a_t} e^{-a_j} of all pairs at once.

    Shapes: weights (..., C, C), values and sums (..., C, Dv) that broadcast to it, C a power of 2; (..., C, Dv).
    """
    size = weights.shape[-1]
    if has_values(sums) and float(sums.detach()[..., -1, :].amin()) >= -MOST_DECAYED:
        factors = sums.exp().to(values.dtype)
        return factors * (weights.tril() @ (values / factors))
    if size <= FEW:  # all pairs of positions, in fewer operators
        factors = (sums.unsqueeze(-2) - sums.unsqueeze(-3)).to(values.dtype).clamp(max=0).exp()  # (..., C, C, Dv)
        return (weights.tril().unsqueeze(-1) * factors * values.unsqueeze(-3)).sum(-2)
    rows = weights.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * values
    half = 1
    while half < size:
        v, a = (tensor.unflatten(-2, (-1, 2, half)) for tensor in (values, sums))  # (..., C / 2h, 2, h, Dv)
        a_end = a[..., 0, -1:, :]
        v = v[..., 0, :, :] * (a_end - a[..., 0, :, :]).exp().to(v.dtype)
        blocks = weights.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # (..., C / 2h, 2, h, C / 2h, 2, h)
        below = blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (..., C / 2h, h, h)
        added = (below @ v) * (a[..., 1, :, :] - a_end).exp().to(v.dtype)
        first, second = rows.unflatten(-2, (-1, 2, half)).unbind(-3)
        rows = torch.stack([first, second + added], -3).flatten(-4, -2)
        half *= 2
    return rows
