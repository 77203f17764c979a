"""The two definitions of linear attention, as plain formulas: all weights at once, and one step at a time.

Both take the features φ(q) and φ(k). Every fast form is tested against these two in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quadratic_weights(
    query: Tensor, key: Tensor, *, keep: Tensor | None = None, decay: Tensor | None = None, normalize: bool = False
) -> Tensor:
    """w_ij = Σ_d φ(q_i)_d φ(k_j)_d e^{g_{j+1,d} + ... + g_{i,d}} where M, divided by Σ_j w_ij if `normalize`.

    Shapes: query (B, H, M, D), key (B, Hk, N, D), keep bool that broadcasts to (B, H, M, N), decay (B, Hk, N) or
    (B, Hk, N, D) with M = N; weights (B, H, M, N). A row whose sum is 0 has weights 0.
    """
    group = query.shape[1] // max(key.shape[1], 1)
    key = key.repeat_interleave(group, 1)  # (B, H, N, D)
    if decay is None:
        weights = query @ key.mT  # (B, H, M, N)
    else:
        decay = decay.repeat_interleave(group, 1)
        decay = decay[..., None] if decay.ndim == 3 else decay  # (B, H, N, 1 or D)
        weights = ((query.unsqueeze(3) * key.unsqueeze(2)) * decays(decay)).sum(-1)  # (B, H, N, N)
    if keep is not None:
        weights = weights.where(keep, 0.0)
    if not normalize:
        return weights
    total = weights.sum(-1, keepdim=True)  # (B, H, M, 1)
    return weights / total.where(total != 0, 1.0)


def decays(decay: Tensor) -> Tensor:
    """e^{g_{j+1} + ... + g_i} for j <= i and 0 for j > i: (..., N, D) to (..., N, N, D)."""
    length = decay.shape[-2]
    ones = torch.ones(length, length, dtype=torch.bool, device=decay.device)
    terms = decay.unsqueeze(-2).where(ones.tril(-1)[..., None], 0.0)  # (..., i, j, D): g_i where i > j
    return terms.cumsum(-3).exp().where(ones.tril()[..., None], 0.0)


def quadratic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    keep: Tensor | None = None,
    decay: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """Σ_j w_ij v_j: (B, H, M, Dv), with the weights of `quadratic_weights` and values (B, Hk, N, Dv)."""
    weights = quadratic_weights(query, key, keep=keep, decay=decay, normalize=normalize)
    return weights @ value.repeat_interleave(query.shape[1] // max(value.shape[1], 1), 1)


def step_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    removal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """S_t = e^{g_t} S_{t-1} + φ(k_t) u_tᵀ and o_t = S_tᵀ φ(q_t), for t = 1..N; the output and the final S.

    u_t = v_t, or β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t), the delta rule, where there is a β; r_t is φ(k_t) without a
    removal.

    Shapes: query (B, H, N, D), key (B, Hk, N, D), value (B, Hk, N, Dv), decay (B, Hk, N) or (B, Hk, N, D), beta
    (B, Hk, N), state (B, Hk, D, Dv), removal (B, Hk, N, D); output (B, H, N, Dv).
    """
    group = query.shape[1] // max(key.shape[1], 1)
    if state is None:
        state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for t in range(key.shape[2]):
        q, k, v = query[:, :, t], key[:, :, t], value[:, :, t]  # (B, H, D), (B, Hk, D), (B, Hk, Dv)
        if decay is not None:
            factor = decay[:, :, t].exp()  # (B, Hk) or (B, Hk, D)
            state = state * (factor[..., None, None] if decay.ndim == 3 else factor[..., None])
        if beta is not None:
            read = k if removal is None else removal[:, :, t]
            v = beta[:, :, t, None] * (v - torch.einsum("bhde,bhd->bhe", state, read))
        state = state + torch.einsum("bhd,bhe->bhde", k, v)
        outputs.append(torch.einsum("bhde,bhd->bhe", state.repeat_interleave(group, 1), q))
    if not outputs:
        return value.new_zeros(*query.shape[:3], value.shape[-1]), state
    return torch.stack(outputs, 2), state
