"""Gradient × attention, from gradients of the outputs, without autograd through the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from ..lenses import RowShard
from .dense_weights import checked_weights
from .output_projection import HeadProjection, head_projections


def weight_gradients(value: Tensor, grad_output: Tensor) -> Tensor:
    """∂S/∂A_ij = g_i · v_j, exact, with g = ∂S/∂output of the attention: (..., heads, M, N).

    It needs values and output gradients only, so any kernel will do. Weights count as independent: the gradient is that
    before the softmax, which couples the weights of a row, is differentiated.

    Shapes: value (..., key heads, N, Dv), grad_output (..., heads, M, Dv); key heads divide heads.

    Raises:
        ShapeError: they do not fit together.

    >>> import torch
    >>> weight_gradients(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 1.0]]]))
    tensor([[[3., 2.]]])
    """
    if value.ndim < 3 or value.ndim != grad_output.ndim or value.shape[-1] != grad_output.shape[-1]:
        raise _shape_error(value, grad_output)
    heads, shared = grad_output.shape[-3], value.shape[-3]
    if not shared or heads % shared:
        raise _shape_error(value, grad_output)
    return grad_output @ value.repeat_interleave(heads // shared, dim=-3).mT


def gradient_times_weights(weights: Tensor, value: Tensor, grad_output: Tensor) -> Tensor:
    """A_ij · ∂S/∂A_ij, signed, the first-order change of S from removing pair (i, j): (..., heads, M, N).

    A row sums to g_i · o_i and a column to v_j · ∂S/∂v_j (over the heads that share it). For long texts compute
    `(output * output.grad).sum(-1)` and `(value * value.grad).sum(-1)`, in O(n).

    Shapes: weights (..., heads, M, N); the others, and the errors, as in `weight_gradients`.

    Source: Hao et al. 2021 (arXiv 2004.11207), section 3, with one step of their integral; Barkan et al. 2021,
    Grad-SAM (arXiv 2204.11073), who keep the positive part.

    >>> import torch
    >>> q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    >>> weights = (q @ k.mT / 2).softmax(-1).requires_grad_()
    >>> output = weights @ v
    >>> output.retain_grad()
    >>> output.square().sum().backward()
    >>> products = gradient_times_weights(weights, v, output.grad)
    >>> torch.allclose(products, weights * weights.grad, atol=1e-6)
    True
    """
    gradients = weight_gradients(value, grad_output)
    weights = checked_weights(weights)
    if weights.shape != gradients.shape:
        raise ShapeError(
            f"weights have the shape {tuple(weights.shape)}; value {tuple(value.shape)} and grad_output "
            f"{tuple(grad_output.shape)} are those of weights {tuple(gradients.shape)}"
        )
    return weights * gradients.to(torch.promote_types(gradients.dtype, weights.dtype))


@dataclass(frozen=True)
class Values:
    """The lens that returns the values of the call, (..., key heads, N, Dv), detached.

    >>> import torch, regard
    >>> values, v = regard.heads.Values(), torch.tensor([[1.0], [2.0]])
    >>> regard.observe(torch.zeros(1, 4), torch.zeros(2, 4), v, values)[values]
    tensor([[1.],
            [2.]])
    """

    def start(self, problem: Problem) -> _ValuesState:
        """The state of one run."""
        return _ValuesState()

    def start_shard(self, problem: Problem, shard: RowShard) -> _ValuesState:
        """The state of one run, which returns the values of this process's keys."""
        return _ValuesState()


class _ValuesState:
    """Reads the values from the problem."""

    reductions = ()

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return problem.value.detach()


@contextmanager
def capturing_gradients(
    model: nn.Module, outputs: Mapping[str, nn.Module | str] | None = None
) -> Iterator[Mapping[str, list[Tensor]]]:
    """Capture the gradients of the attention outputs of a model that runs inside a `with` block.

    After the backward pass, which may come after the block, `gradients[name]` has one (batch, heads, M, Dv) for each
    call, in their order; several backward passes accumulate, as in `.grad`. With `Values` and `Weights` from
    `regard.huggingface.observing` this gives `gradient_times_weights` of a whole model, with any kernel.

    Args:
        model: the model that the block runs, with autograd.
        outputs: output projections that are not found by name, as in `ablating`.

    Raises:
        ConfigurationError: no attention module with a known output projection.

    >>> import torch, regard
    >>> model, x = torch.nn.Sequential(regard.nn.Attention(regard.nn.Projections(4, num_heads=2))), torch.randn(1, 3, 4)
    >>> with capturing_gradients(model) as gradients:
    ...     model(x).sum().backward()
    >>> gradients["0"][0].shape
    torch.Size([1, 2, 3, 2])
    """
    found = head_projections(model, outputs)
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no attention module whose heads can be told apart: name its output "
            "projections, as outputs={'name.of.attention': 'name.of.linear'}"
        )
    gradients: dict[str, list[Tensor]] = {name: [] for name in found}
    with ExitStack() as hooks:
        for name, projection in found.items():
            hook = _CaptureGradients(projection, gradients[name])
            hooks.callback(projection.module.register_forward_pre_hook(hook).remove)
        yield gradients


class _CaptureGradients:
    """A forward pre-hook that captures the gradient of an output projection's input, by head, for each call."""

    def __init__(self, projection: HeadProjection, captured: list[Tensor]) -> None:
        self.projection, self.captured = projection, captured

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, call = inputs[0], len(self.captured)
        if not torch.is_grad_enabled():
            return inputs
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        parts = (self.projection.heads, self.projection.width)
        self.captured.append(torch.zeros_like(tensor).unflatten(-1, parts).transpose(-2, -3))

        def accumulate(gradient: Tensor) -> None:
            self.captured[call] = self.captured[call] + gradient.unflatten(-1, parts).transpose(-2, -3)

        tensor.register_hook(accumulate)
        return (tensor, *inputs[1:])


def _shape_error(value: Tensor, grad_output: Tensor) -> ShapeError:
    return ShapeError(
        f"value has the shape {tuple(value.shape)} and grad_output {tuple(grad_output.shape)}; they need (..., key "
        "heads, N, Dv) and (..., heads, M, Dv), with key heads that divide the heads"
    )
