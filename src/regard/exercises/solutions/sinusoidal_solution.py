"""Sinusoidal positions (Vaswani et al. 2017): feature 2i has the sine, 2i + 1 the cosine, of p · 10000^(-2i / D)."""

import torch
from torch import Tensor


def with_positions(embeddings: Tensor) -> Tensor:
    """The embeddings with the vector of its position, 0, 1, 2, ..., added to each.

    Shapes: embeddings (..., N, D), D even; returns (..., N, D).
    """
    length, dim = embeddings.shape[-2:]
    positions = torch.arange(length)
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2) / dim)  # hole: of the pairs i = 0, 1, ..., (D / 2,)
    angles = positions[:, None] * frequencies  # hole: of all positions and pairs, (N, D / 2)
    pairs = torch.stack([angles.sin(), angles.cos()], dim=-1)  # hole: sine and cosine of each angle, (N, D / 2, 2)
    return embeddings + pairs.flatten(-2)  # hole: the embeddings with their positions, (..., N, D)
