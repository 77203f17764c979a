"""Merge softmax attention over disjoint sets of keys by log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from .score_forms import at_least_float32

INFINITY = float("inf")


def merge_softmax(outputs: Tensor, lses: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Lse = log Σ_p exp(lse_p) and output = Σ_p exp(lse_p - lse) · output_p, over parts p stacked along `dim`.

    Shapes: outputs (..., P, ..., Dv) and lses (..., P, ...), where `dim` counts from the front; the results lack that
    axis. Rows without keys in any part have output 0 and lse -inf. Differentiable; in float32 at least.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), the online softmax.

    >>> merge_softmax(torch.tensor([[1.0], [3.0]]), torch.zeros(2), dim=0)
    (tensor([2.]), tensor(0.6931))
    """
    peak = lses.detach().amax(dim, keepdim=True)
    peak = peak.masked_fill(peak.isinf(), 0.0)
    shares = torch.exp(lses - peak)
    total = shares.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # neither the quotient nor the gradient of the log divides by 0
    output = ((shares / total).unsqueeze(-1) * at_least_float32(outputs)).sum(dim)
    return output, (total.log() + peak).masked_fill(empty, -INFINITY).squeeze(dim)
