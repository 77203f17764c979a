"""The turn itself: pairs of features times cosines and sines, on a CPU a stretch of a long sequence at a time."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..transforms import transformed

Layout = Literal["half", "interleaved"]
LAYOUTS = ("half", "interleaved")

# Features that a CPU turns at a time: products of this size use the same memory again and again. Those of a long
# sequence turned at once are fresh from the system each time, which takes several times as long as the arithmetic.
STRETCH = 1 << 19


def turned(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Each pair (x, y) of the first features as (x cos - y sin, x sin + y cos), the others as they are.

    Shapes: tensor (..., length, head_dim), cos and sin (..., length, dim/2) that broadcast with it.
    """
    if tensor.device.type == "cpu" and tensor.numel() > STRETCH and not (transformed() or cos.requires_grad):
        return Stretches.apply(tensor, cos, sin, layout)  # type: ignore[return-value]
    return _whole(tensor, cos, sin, layout)


class Stretches(torch.autograd.Function):
    """The same numbers as of the whole tensor, a stretch at a time."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)
        ctx.layout = layout
        length = tensor.shape[-2]
        rows = max(1, STRETCH * length // tensor.numel())
        result = torch.empty_like(tensor)
        split = (whole.split(rows, dim=-2) for whole in (tensor, cos, sin, result))
        for stretch, its_cos, its_sin, into in zip(*split, strict=True):
            into.copy_(_whole(stretch, its_cos, its_sin, layout))
        return result

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(upstream[0], cos, -sin, ctx.layout), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        cos, sin = ctx.saved_tensors
        return turned(tangents[0], cos, sin, ctx.layout)


def _whole(tensor: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    dim = 2 * cos.shape[-1]
    x, y = _pairs(tensor[..., :dim], layout)
    features = _features(x * cos - y * sin, x * sin + y * cos, layout).to(tensor.dtype)
    return features if dim == tensor.shape[-1] else torch.cat([features, tensor[..., dim:]], dim=-1)


def _pairs(features: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The first and the second feature of each pair: two tensors (..., dim/2)."""
    if layout == "half":
        x, y = features.chunk(2, dim=-1)
    else:
        x, y = features.unflatten(-1, (-1, 2)).unbind(-1)
    return x, y


def _features(x: Tensor, y: Tensor, layout: Layout) -> Tensor:
    """The pairs put back where `_pairs` found them: (..., dim)."""
    return torch.cat([x, y], dim=-1) if layout == "half" else torch.stack([x, y], dim=-1).flatten(-2)
