"""Merging parts of a softmax by their log-sum-exp, and log-sum-exps that are too large for float32.

Next to a score of 10⁷, where neighbouring float32 numbers are 1 apart, log Σ exp(score) cannot express how many keys
share the row: weights recomputed from it sum to 1.4, and to infinity at 10⁹. In float64 that begins at 10¹².
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.pytree import tree_flatten, tree_unflatten
from .grid import WHOLE
from .problem import Problem
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


LARGEST_LSE = 2.0**14
"""Up to this magnitude a float32 log-sum-exp is rounded by at most 2⁻¹¹, and so are weights computed from it."""

PAIRS_AT_ONCE = 2**22
"""Scores that are in memory at once while log-sum-exps are computed again."""


def within_float32(lse: Tensor) -> bool:
    """Whether all log-sum-exps are finite and small enough for float32: one pass, true of nearly every problem."""
    if not lse.numel():
        return True
    low, high = torch.stack(torch.aminmax(lse)).tolist()  # one transfer from the device
    return low > -LARGEST_LSE and high < LARGEST_LSE


def too_large(lse: Tensor) -> Tensor:
    """Which rows have a finite log-sum-exp that float32 rounds by more than the weights may be off."""
    return lse.isfinite() & (lse.abs() > LARGEST_LSE) if lse.dtype == torch.float32 else torch.zeros_like(lse).bool()


def with_exact_lse(problem: Problem, lse: Tensor) -> tuple[Problem, Tensor]:
    """The problem in float64 and its rows' log-sum-exps, recomputed block by block; non-finite ones are unchanged."""
    wide, pairs_of_row = in_float64(problem), max(problem.weights_shape[:-2].numel() * problem.keys, 1)
    height = max(PAIRS_AT_ONCE // pairs_of_row, 1)
    rows = [slice(first, min(first + height, problem.queries)) for first in range(0, problem.queries, height)]
    exact = torch.cat([wide.scores(part, WHOLE).logsumexp(-1) for part in rows], -1)
    if wide.sinks is not None:
        exact = torch.logaddexp(exact, wide.sinks[:, None])
    return wide, torch.where(lse.isfinite(), exact, lse.double())


def in_float64(problem: Problem) -> Problem:
    """The problem over float64 copies of its floating-point tensors."""
    tensors, form = tree_flatten(problem)
    wide: Problem = tree_unflatten(
        form, [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
    )
    return wide
