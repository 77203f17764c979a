"""The group `additive` of the backend in Triton: attention with scores weight · tanh(q + k), forward and backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import CheckedRows
from ...core.score_forms import AdditivePairs


class AdditiveInTriton:
    """Scores, softmax and the sum of values in one pass, and the gradients in two; memory linear in the lengths.

    Nothing waits for the device, and results need no check, as those of `FlashInTriton`: NaN, and infinity in a query
    or key, reach the rows that attend to them and no others, gradients come from rows whose output is finite, and the
    log-sum-exp of a row may have any size. A bias that is neither a tensor nor by distance is evaluated over all pairs.
    """

    def prepare_whole(self, pairs: AdditivePairs, value: Tensor, softcap: float | None, absent: Tensor | None) -> None:
        """Nothing: its tiles take one launch."""

    def forward(self, batched: BatchedProblem, tile: int) -> CheckedRows:
        """Output and log-sum-exp; kernels have tiles of their own."""
        from .additive_launches import AdditiveLaunches  # imports Triton, which a process without CUDA need not load

        output, lse = batched.empty_results()
        with torch.cuda.device_of(batched.value):
            AdditiveLaunches(batched).forward(output, lse)
        return CheckedRows((output, lse))

    def backward(self, batched: BatchedProblem, saved: Saved, tile: int) -> ProblemGradients:
        """The gradients of query, key, weight and value, and of a bias where `saved` asks for it."""
        from .additive_launches import AdditiveLaunches

        gradients = batched.zero_gradients(bias=saved.needs_bias_grad)
        with torch.cuda.device_of(batched.value):
            AdditiveLaunches(batched).backward(saved, gradients)
        return replace(gradients, checked=True)
