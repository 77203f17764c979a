"""Calls of the flash kernel in C whose times give its rates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...tiles.tile_bits import all_tiles
from . import library
from .few_queries import attend_few_queries
from .flash_tiles import FlashProblem

SCALE = 0.125
PACKING_ROWS = 256
"""Rows for which a block of keys is packed once: `flash_tiles.ROW_BLOCKS` blocks of 64."""


class TimedFlashInC:
    """Flash attention in C, and few queries for what is read once."""

    few_rows: tuple[int, int] = (8, 64)
    begins_tiles = False

    def dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        """All that the code reads, on the CPU."""
        return library.DTYPES if device == "cpu" else ()

    def packing_rows(self, rows: int) -> int:
        """All of few, `PACKING_ROWS` of many."""
        return min(PACKING_ROWS, rows)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """Output and log-sum-exp."""
        return _problem(query, key, value).forward

    def backward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """The gradients of query, key and value."""
        problem = _problem(query, key, value)
        output, lse = problem.forward()
        return lambda: problem.backward(output, lse, output, None)

    def stream(self, key: Tensor, value: Tensor) -> Callable[[], object]:
        """One query of each head."""
        query = torch.ones(*key.shape[:2], 1, key.shape[-1], dtype=key.dtype, device=key.device)
        return lambda: attend_few_queries(query, key, value, SCALE)


def _problem(query: Tensor, key: Tensor, value: Tensor) -> FlashProblem:
    return FlashProblem(query, key, value, SCALE, all_tiles(query.shape[2], key.shape[2]))
