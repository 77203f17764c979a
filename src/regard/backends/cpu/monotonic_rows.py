"""The rows of monotonic attention in C, each after the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.torch_modes import mapped_by_autograd, no_mode_active
from ...normalizers.monotonic import register_rows
from . import library


class MonotonicRowsInC:
    """Rows of float32 on the CPU."""

    def takes(self, *rows: Tensor) -> bool:
        """Whether they have numbers to read, and nothing of torch's watches what becomes of them."""
        return (
            not torch.compiler.is_compiling()
            and no_mode_active()
            and all(
                tensor.dtype is torch.float32
                and tensor.is_cpu
                and type(tensor) is Tensor
                and not tensor.requires_grad
                and not mapped_by_autograd(tensor)
                for tensor in rows
            )
            and library.available()
        )

    def forward(self, stop: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of stopping at a key, and of getting to it."""
        stop, before = stop.contiguous(), before.contiguous()
        alignments, reached = torch.empty_like(stop), torch.empty_like(stop)
        sizes = stop.shape[:-2].numel(), *stop.shape[-2:]
        library.current().monotonic(
            stop.data_ptr(), before.data_ptr(), *sizes, alignments.data_ptr(), reached.data_ptr()
        )
        return alignments, reached

    def backward(self, stop: Tensor, reached: Tensor, of_alignments: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients in the probabilities `stop`, and in those of the row before the first."""
        stop, of_alignments = stop.contiguous(), of_alignments.contiguous()
        later, of_stop = later.clone(memory_format=torch.contiguous_format), torch.empty_like(stop)
        sizes = stop.shape[:-2].numel(), *stop.shape[-2:]
        library.current().monotonic_backward(
            *(each.data_ptr() for each in (stop, reached, of_alignments, later)), *sizes, of_stop.data_ptr()
        )
        return of_stop, later


register_rows(MonotonicRowsInC())
