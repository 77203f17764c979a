"""The product of two batches of rows whose result is large: by oneDNN, into memory of `large_results`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .broadcasting import broadcast_shapes
from .large_results import LARGE_BYTES, new_large
from .onednn import batched_linear, transposed_product, uses_onednn
from .torch_modes import under_transform

ROWS_AT_ONCE = 1024
"""Rows that are multiplied at a time, so that their product is in a cache when it is copied to where it stays."""


def large_product(left: Tensor, right: Tensor) -> Tensor:
    """The product left · rightᵀ of each batch, differentiable.

    Shapes: (..., M, D) and (..., L, D) to (..., M, L).

    >>> import torch
    >>> large_product(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    leading = broadcast_shapes(left.shape[:-2], right.shape[:-2])
    large = math.prod((*leading, left.shape[-2], right.shape[-2])) * left.element_size() >= LARGE_BYTES
    if under_transform() or not left.is_cpu or not large or left.dtype != right.dtype:
        return left @ right.mT
    return _LargeProduct.apply(left, right)  # type: ignore[return-value]


class _LargeProduct(torch.autograd.Function):
    """The product, and its gradient from products of the same kind."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        leading = broadcast_shapes(left.shape[:-2], right.shape[:-2])
        result = new_large(left, *leading, left.shape[-2], right.shape[-2])
        if not uses_onednn(_first(left)[:ROWS_AT_ONCE], _first(right)):
            return torch.matmul(left, right.mT, out=result)
        for rows, columns, into in zip(*_batches(leading, left, right, result), strict=True):
            for part, target in zip(rows.split(ROWS_AT_ONCE), into.split(ROWS_AT_ONCE), strict=True):
                target.copy_(batched_linear(part, columns))
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        leading, of_left, of_right = upstream.shape[:-2], None, None
        upstreams, rows, columns = _batches(leading, upstream, left, right)
        if ctx.needs_input_grad[0]:
            each = [batched_linear(above, own.mT) for above, own in zip(upstreams, columns, strict=True)]
            of_left = torch.stack(each).view(*leading, *left.shape[-2:]).sum_to_size(left.shape)
        if ctx.needs_input_grad[1]:
            each = [transposed_product(above, own) for above, own in zip(upstreams, rows, strict=True)]
            of_right = torch.stack(each).view(*leading, *right.shape[-2:]).sum_to_size(right.shape)
        return of_left, of_right


def _batches(leading: torch.Size, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor's matrices, one for each of the batches of all.

    They are contiguous: of rows that are apart, as those of the heads of a projection, oneDNN takes 100 times as long.
    """
    return [tensor.expand(*leading, -1, -1).reshape(-1, *tensor.shape[-2:]).contiguous().unbind() for tensor in tensors]


def _first(tensor: Tensor) -> Tensor:
    """The matrix of the first batch."""
    return tensor[(0,) * (tensor.ndim - 2)]
