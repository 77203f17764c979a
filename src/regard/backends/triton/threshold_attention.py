"""The code `threshold` of the backend in Triton: sparsemax and entmax over the tiles of a mask."""

from __future__ import annotations

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import CheckedRows
from ...core.problem import Problem
from ...normalizers import Entmax, Sparsemax
from .fused_attention import MAX_DIM, FlashInTriton

SWEEPS = 8
"""How often scores are usually computed: for the largest, for each step to the threshold, for the output."""


class ThresholdsInTriton:
    """Flash attention, whose weights are what scores have above the threshold of their row.

    Backward, one more pass over the tiles takes the place of Σ grad_output · output.
    """

    def __init__(self, flash: FlashInTriton) -> None:
        self.flash = flash

    def why_not(self, problem: Problem) -> list[str]:
        """Other normalizers, sinks, and what flash attention does not compute."""
        reasons = []
        if not isinstance(problem.normalizer, (Sparsemax, Entmax)):
            reasons.append("its code computes normalizers.Sparsemax and normalizers.Entmax")
        if problem.sinks is not None:
            reasons.append("its code has no sinks")
        dims = problem.pairs.query.shape[-1], problem.value.shape[-1]
        if max(dims) > MAX_DIM:
            reasons.append(f"its code takes head dims up to {MAX_DIM}; these are {dims[0]} and {dims[1]}")
        return reasons or self.flash.why_not(problem)

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs of the tiles that are not empty, each as often as its score is computed."""
        return SWEEPS * self.flash.visited_pairs(problem)

    def forward(self, batched: BatchedProblem) -> CheckedRows:
        """Output and thresholds."""
        return self.flash.forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of query, key and value, and of a bias; `Saved.lse` has the thresholds."""
        return self.flash.backward(batched, saved)
