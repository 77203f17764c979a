"""Rotary positions (Su et al. 2021): each pair of features is turned by an angle, the position times a frequency."""

import torch
from torch import Tensor


def rotate(rows: Tensor, positions: Tensor) -> Tensor:
    """Queries or keys, turned: the pair i at position p by p · 10000^(-2i / D). It has the features i and i + D / 2.

    Shapes: rows (..., N, D), D even, positions (N,); returns (..., N, D).
    """
    half = rows.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)  # hole: of the pairs i = 0, 1, ..., (D / 2,)
    angles = positions[:, None] * frequencies  # hole: of all positions and pairs, (N, D / 2)
    first, second = rows[..., :half], rows[..., half:]
    turned = first * angles.cos() - second * angles.sin()  # hole: the first features, turned, (..., N, D / 2)
    other = first * angles.sin() + second * angles.cos()  # hole: the second features, turned, (..., N, D / 2)
    return torch.cat([turned, other], dim=-1)
