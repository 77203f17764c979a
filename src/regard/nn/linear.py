"""x Wᵀ + b by what is fastest for so many positions: for few, native code reads W as fast as memory gives it.

x Wᵀ + b for many positions: by oneDNN in single precision, where torch has it and would call another library.

Torch's build for x86 brings two libraries of matrix products. In float32 its `linear` calls MKL, whose fastest code is
for Intel's processors alone; oneDNN, which torch keeps for half precision and for models that it compiles, writes its
code for whatever processor has AVX-512: twice as fast on an AMD EPYC of the fifth generation (docs/benchmarks.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from .. import native
from ..core.torch_modes import under_dispatch_mode, under_transform

LEAST_WORK = 2**25
"""Multiplications below which the code that oneDNN writes for each new shape takes longer than it saves."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x Wᵀ + b, x (..., in), W (out, in), b (out,), with all of torch's derivatives."""
    if is_for_onednn(x, weight, bias):
        return _Product.apply(x, weight, bias)  # type: ignore[return-value]
    return functional.linear(x, weight, bias)


def is_for_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a product is large, in single precision, and oneDNN is there, allowed, and at home on this processor."""
    return (
        not (under_transform() or under_dispatch_mode())  # first: what is compiled or traced is not to depend on sizes
        and _is_large(x, weight, bias)  # before all else, for small products are done in microseconds
        and are_plain(x, weight, bias)
        and all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in (x, weight, bias) if tensor is not None)
        and not torch.is_autocast_enabled("cpu")
        and _is_at_home()
        and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    )


def are_plain(*tensors: Tensor | None) -> bool:
    """Whether tensors are numbers in memory and no more, and nothing looks on: all else is for torch's dispatcher."""
    return not under_dispatch_mode() and all(
        tensor is None or (type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided) for tensor in tensors
    )


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b; dx = dy W, dW = dyᵀ x, db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        # What no gradient needs may change before the backward pass, or go.
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        ctx.save_for_forward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = upstream[0].flatten(0, -2)
        return (
            product(upstream[0], weight.T) if of_x else None,
            _summed_over_rows(rows, x.flatten(0, -2)) if of_weight else None,
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
    return product(right.T, left.T).T.contiguous()


def _is_large(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether there is a product, and of so many numbers that another library is worth while."""
    return (
        weight.ndim == 2
        and x.numel() * weight.shape[0] >= LEAST_WORK
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


@cache
def _is_at_home() -> bool:
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


MOST_ROWS = {torch.float32: 64, torch.bfloat16: 8}
"""Positions, of all sequences together, up to which torch's products take longer."""

MOST_ROWS_BEFORE_ONEDNN = 24
"""The same for products that are large enough for oneDNN."""

LEAST_WEIGHTS = 2**20
"""Fewer weights are done before native code has begun."""


class Linear(nn.Linear):
    """`torch.nn.Linear`, the same weights and the same result: y = x Wᵀ + b, x (..., in), y (..., out).

    While text is generated, each step reads all weights for a few positions, and takes as long as that. Torch's matrix
    products are made for many positions; for few, on a CPU and without gradient, native code reads the weights at the
    rate of memory. For many, in single precision on a CPU with AVX-512, it is oneDNN that multiplies, unless
    `torch.backends.mkldnn.enabled` is False; torch calls MKL there. Everything else is torch's own.

    >>> import torch
    >>> layer = Linear(4, 2)
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch calls it so)
        """The product of the positions with the weights."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x Wᵀ + b, x (..., in), W (out, in), b (out,): `torch.nn.functional.linear`, as `Linear` computes it.

    >>> import torch
    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 7.]])
    """
    if not _reads_fast(x, weight, bias):
        return product(x, weight, bias)
    rows = native.times_matrix(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def _reads_fast(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it is a matter of reading the weights, and native code can."""
    return (
        not (under_transform() or under_dispatch_mode())  # first: what is compiled or traced is not to depend on sizes
        and weight.numel() >= LEAST_WEIGHTS
        and are_plain(x, weight, bias)
        and x.shape[-1] == weight.shape[-1]
        and 0 < x.numel() <= MOST_ROWS.get(x.dtype, 0) * x.shape[-1]
        and not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)))
        and not torch.is_autocast_enabled("cpu")
        and native.reads(x, weight)
        and (x.numel() <= MOST_ROWS_BEFORE_ONEDNN * x.shape[-1] or not is_for_onednn(x, weight, bias))
    )
