"""x Wᵀ + b for many positions: by oneDNN in single precision, where torch has it and would call another library.

Torch's build for x86 brings two libraries of matrix products. In float32 its `linear` calls MKL, whose fastest code is
for Intel's processors alone; oneDNN, which torch keeps for half precision and for models that it compiles, writes its
code for whatever processor has AVX-512: twice as fast on an AMD EPYC of the fifth generation (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import has_torch_function

from ..transforms import transformed, watched

LEAST_WORK = 2**25
"""Multiplications below which the code that oneDNN writes for each new shape takes longer than it saves."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x Wᵀ + b, x (..., in), W (out, in), b (out,), with all of torch's derivatives."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if _is_plain(tensors) and _is_large(*tensors) and there_is_onednn():
        return _Product.apply(x, weight, bias)  # type: ignore[return-value]
    return functional.linear(x, weight, bias)


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b; dx = dy W, dW = dyᵀ x, db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows, x = upstream[0].reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        return (
            product(upstream[0], weight.T) if of_x else None,
            _summed_over_rows(rows, x) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        (x, weight), (of_x, of_weight, of_bias) = ctx.saved_tensors, tangents
        parts = [
            None if of_x is None else functional.linear(of_x, weight),
            None if of_weight is None else functional.linear(x, of_weight),
            None if of_bias is None else of_bias.expand(*x.shape[:-1], weight.shape[0]),
        ]
        return sum(part for part in parts if part is not None)  # type: ignore[return-value]


def _summed_over_rows(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ right, the wider of them as oneDNN's matrix, which takes half the time that it takes as its rows."""
    if left.shape[1] <= right.shape[1]:
        return product(left.T, right.T)
    return product(right.T, left.T).T


def _is_large(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether there is a product, and of so many numbers that another library is worth while."""
    fits = x.ndim > 1 and weight.ndim == 2 and x.shape[-1] == weight.shape[-1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    return fits and x.numel() * weight.shape[0] >= LEAST_WORK


def _is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether these are numbers in single precision in the processor's own memory, and nothing looks on."""
    return (
        not (transformed() or watched())
        and all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in tensors)
        and not torch.is_autocast_enabled("cpu")
        and not has_torch_function(tensors)
    )


def there_is_onednn() -> bool:
    """Whether it is there, allowed, and at home on this processor."""
    return _is_at_home() and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]


@cache
def _is_at_home() -> bool:
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
