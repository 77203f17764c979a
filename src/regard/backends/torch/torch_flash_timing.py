"""Calls of torch's own flash kernel whose times give its rates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCKS = ((768, 256), (192, 64), (0, 32))
"""From so many rows on it computes blocks of so many."""
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packing_rows(rows: int) -> int:
    """The rows, of so many, for which torch's flash kernel packs a block of keys and values once: `BLOCKS`.

    >>> packing_rows(1000), packing_rows(200), packing_rows(20)
    (256, 64, 20)
    """
    return min(next(block for least, block in BLOCKS if rows >= least), rows)


def _rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _forward(query, key, value)[0] if query.is_cpu else scaled_dot_product_attention(query, key, value)


class TimedFlashOfTorch:
    """The kernel of `scaled_dot_product_attention`; on CPUs by its operator, before which the function takes steps."""

    few_rows: tuple[int, int] = (32, 64)
    begins_tiles = True

    def dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        """All; but on a CPU alone float64, of which other devices have no flash kernel."""
        wide = (torch.float64,) if device == "cpu" else ()
        return torch.float32, *wide, torch.bfloat16, torch.float16

    packing_rows = staticmethod(packing_rows)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """Output and log-sum-exp."""
        return lambda: _rows(query, key, value)

    def backward(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], object]:
        """The gradients of query, key and value."""
        if not query.is_cpu:
            inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            with torch.enable_grad():
                output = _rows(*inputs)
            return lambda: torch.autograd.grad(output, inputs, value, retain_graph=True)
        output, lse = _forward(query, key, value)
        return lambda: _backward(output, query, key, value, output, lse, 0.0, False)

    def stream(self, key: Tensor, value: Tensor) -> Callable[[], object]:
        """One query of each head, or two of bfloat16, as `dense_block.without_single_row` has them."""
        rows = 2 if key.dtype == torch.bfloat16 else 1
        query = torch.ones(*key.shape[:2], rows, key.shape[-1], dtype=key.dtype, device=key.device)
        return lambda: _rows(query, key, value)
