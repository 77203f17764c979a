"""Whether oneDNN computes a product in float32: with AVX-512 it takes less than half of the time of torch's own."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional

from .torch_modes import under_dispatch_mode, under_transform

MIN_ONEDNN_PRODUCTS = 2**25
"""Multiplications below which the code generation of oneDNN for each new shape costs more than it saves."""


def batched_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Product x Wᵀ + b by oneDNN or torch, x (..., in), W (out, in), b (out,), with all of torch's derivatives."""
    if uses_onednn(x, weight, bias):
        return _OneDnnLinear.apply(x, weight, bias)  # type: ignore[return-value]
    return functional.linear(x, weight, bias)


def uses_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN computes a product: a large one in float32, where it is available, enabled and the faster one."""
    return (
        not (under_transform() or under_dispatch_mode())  # first: a compiled or traced graph must not depend on sizes
        and _is_large(x, weight, bias)  # before the other checks, as a small product takes only microseconds
        and are_plain_tensors(x, weight, bias)
        and all(tensor.is_cpu and tensor.dtype == torch.float32 for tensor in (x, weight, bias) if tensor is not None)
        and not torch.is_autocast_enabled("cpu")
        and onednn_is_faster()
        and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    )


def are_plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether all are strided tensors or parameters and no dispatch mode is active, so that no dispatch is needed."""
    return not under_dispatch_mode() and all(is_plain(tensor) for tensor in tensors)


def is_plain(tensor: Tensor | None) -> bool:
    """Whether a tensor, if there is one, is strided, and of no class of its own."""
    return tensor is None or (type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided)


def _is_large(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the shapes fit, and the product has enough multiplications for oneDNN."""
    return (
        weight.ndim == 2
        and x.numel() * weight.shape[0] >= MIN_ONEDNN_PRODUCTS
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )


@cache
def onednn_is_faster() -> bool:
    """Whether it is there, and has vectors that torch's own product does not use."""
    has_operator = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class _OneDnnLinear(torch.autograd.Function):
    """y = x Wᵀ + b; dx = dy W, dW = dyᵀ x, db = Σ dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        for_x, for_weight, _ = ctx.needs_input_grad
        # Inputs that no gradient needs may be changed or freed before the backward pass.
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        ctx.save_for_forward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = upstream[0].flatten(0, -2)
        return (
            batched_linear(upstream[0], weight.T) if for_x else None,
            transposed_product(rows, x.flatten(0, -2)) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor | None:
        (x, weight), (dx, dweight, dbias) = ctx.saved_tensors, tangents
        parts = [
            None if dx is None else functional.linear(dx, weight),
            None if dweight is None else functional.linear(x, dweight),
            None if dbias is None else dbias.expand(*x.shape[:-1], weight.shape[0]),
        ]
        return sum(part for part in parts if part is not None)  # type: ignore[return-value]


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """The product leftᵀ right; the wider operand is passed to oneDNN as the weight, which takes half the time."""
    if left.shape[1] <= right.shape[1]:
        return batched_linear(left.T, right.T)
    return batched_linear(right.T, left.T).T.contiguous()
