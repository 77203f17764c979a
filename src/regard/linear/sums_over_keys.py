"""What is made of sums over keys: a query reads them, and its row is divided by its total."""

from __future__ import annotations

import torch
from torch import Tensor


def read_state(query: Tensor, state: Tensor) -> Tensor:
    """Sᵀ q of each query: (B, H, M, D) and (B, Hk, D, Dv) to (B, H, M, Dv)."""
    rows = by_key_head(query, state.shape[1]).flatten(2, 3) @ state
    return rows.view(*query.shape[:3], state.shape[-1])


def by_key_head(tensor: Tensor, key_heads: int) -> Tensor:
    """Rows of the query heads of each key head: (B, H, M, ·) to (B, Hk, r, M, ·)."""
    return tensor.unflatten(1, (key_heads, -1)) if key_heads else tensor.unsqueeze(2)


def divide_by_totals(sums: Tensor) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij, with the divisor in the last column: (..., Dv + 1) to (..., Dv)."""
    return sums[..., :-1] / divisor(sums[..., -1:])


def divisor(total: Tensor) -> Tensor:
    """The totals, and infinity for those below the smallest normal number, so that a row without weights is 0.

    Of a smaller number, 1 / total may be infinite, and the gradient NaN.
    """
    return total.where(total.abs() >= torch.finfo(total.dtype).tiny, torch.inf)
