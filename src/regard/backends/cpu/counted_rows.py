"""Positions that gates count, and the numbers of a table at them, in C."""

from __future__ import annotations

import torch
from torch import Tensor

from ...biases.cope import register_positions
from ...core.torch_modes import mapped_by_autograd, no_mode_active
from . import library


class CountedPositionsInC:
    """Rows of float32 on the CPU."""

    def takes(self, *rows: Tensor) -> bool:
        """Whether they have numbers to read, and nothing of torch's watches what becomes of them."""
        for tensor in rows:
            if tensor.requires_grad or tensor.dtype is not torch.float32 or not tensor.is_cpu:
                return False
            if type(tensor) is not Tensor or mapped_by_autograd(tensor):
                return False
        return not torch.compiler.is_compiling() and no_mode_active() and library.available()

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
