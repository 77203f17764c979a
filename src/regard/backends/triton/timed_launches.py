"""Calls of the kernels in Triton whose times give the rates of a card."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, Saved
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from . import jit_runtime
from .fused_attention import FlashInTriton
from .split_keys import FewQueriesInTriton

SCALE = 0.125
ROWS_AT_ONCE = 128
"""Rows of a program: it reads each tile of keys and values once for all of them."""


class TimedFlashInTriton:
    """Flash attention in Triton, and few queries for what is read once."""

    few_rows: tuple[int, int] = (64, 64)
    begins_tiles = False

    def dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        """All that the kernels read, where they run."""
        return jit_runtime.DTYPES if device == jit_runtime.DEVICE else ()

    def packing_rows(self, rows: int) -> int:
        """Those of a program."""
        return min(ROWS_AT_ONCE, rows)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """Output and log-sum-exp."""
        batched = _batched(query, key, value)
        return lambda: FlashInTriton().forward(batched)

    def backward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """The gradients of query, key and value."""
        batched = _batched(query, key, value)
        output, lse = FlashInTriton().forward(batched)
        saved = Saved(output, lse, output, torch.zeros_like(lse))
        return lambda: FlashInTriton().backward(batched, saved)

    def stream(self, key: Tensor, value: Tensor) -> Callable[[], object]:
        """One query of each head."""
        query = torch.ones(*key.shape[:2], 1, key.shape[-1], dtype=key.dtype, device=key.device)
        return lambda: FewQueriesInTriton().forward(query, key, value, SCALE)


def _batched(query: Tensor, key: Tensor, value: Tensor) -> BatchedProblem:
    return BatchedProblem.from_problem(Problem(DotPairs(query, key, SCALE), value))
