"""Positions that gates count, and the numbers of a table at them, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ...biases.cope import register_positions
from . import library
from .plain_rows import are_plain


class CountedPositionsInC:
    """Rows of float32 on the CPU."""

    def takes(self, *rows: Tensor) -> bool:
        """Whether they have numbers to read, and nothing of torch's watches what becomes of them."""
        return all(type(tensor) is Tensor for tensor in rows) and are_plain(*rows)

    def interpolated(self, table: Tensor, gates: Tensor) -> Tensor:
        """The numbers of a table (..., m, positions) at the sums of gates (..., m, n): (..., m, n)."""
        table, gates = table.contiguous(), gates.contiguous()
        values, columns, positions = torch.empty_like(gates), gates.shape[-1], table.shape[-1]
        rows = gates.numel() // max(columns, 1)
        library.current().counted_positions(
            gates.data_ptr(), table.data_ptr(), rows, columns, positions, values.data_ptr()
        )
        return values


register_positions(CountedPositionsInC())
