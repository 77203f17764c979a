"""Gradient × attention: how much a result would change with each weight, without autograd through n² weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from .apply_lenses import checked
from .output_projection import HeadProjection, head_projections


def weight_gradients(value: Tensor, grad_output: Tensor) -> Tensor:
    """∂S/∂A_ij = g_i · v_j, exact, where g is the gradient of S for the output of the attention: (..., heads, M, N).

    No kernel has to keep its weights for it: hooks catch value and gradient. Each weight counts as free; that the
    softmax norms a row is not in it.

    Shapes: value (..., key heads, N, Dv), grad_output (..., heads, M, Dv); key heads divide heads.

    Raises:
        ShapeError: they do not fit together.

    >>> import torch
    >>> weight_gradients(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[3.0, 1.0]]]))
    tensor([[[3., 2.]]])
    """
    if value.ndim < 3 or value.ndim != grad_output.ndim or value.shape[-1] != grad_output.shape[-1]:
        raise _unfitting(value, grad_output)
    heads, shared = grad_output.shape[-3], value.shape[-3]
    if not shared or heads % shared:
        raise _unfitting(value, grad_output)
    return grad_output @ value.repeat_interleave(heads // shared, dim=-3).mT


def gradient_times_weights(weights: Tensor, value: Tensor, grad_output: Tensor) -> Tensor:
    """A_ij · ∂S/∂A_ij: to the first order, what S loses without pair (i, j), signed: (..., heads, M, N).

    A row sums to g_i · o_i and a column to v_j · ∂S/∂v_j (over the heads that share it): for long texts take
    `(output * output.grad).sum(-1)` and `(value * value.grad).sum(-1)`, in O(n).

    Shapes: weights (..., heads, M, N); the others, and the errors, as in `weight_gradients`.

    Source: Hao et al. 2021 (arXiv 2004.11207), section 3, with one step of their integral; Barkan et al. 2021,
    Grad-SAM (arXiv 2204.11073), who keep what is above 0.

    >>> import torch
    >>> q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
    >>> weights = (q @ k.mT / 2).softmax(-1).requires_grad_()
    >>> output = weights @ v
    >>> output.retain_grad()
    >>> output.square().sum().backward()
    >>> shown = gradient_times_weights(weights, v, output.grad)
    >>> torch.allclose(shown, weights * weights.grad, atol=1e-6)
    True
    """
    gradients = weight_gradients(value, grad_output)
    weights = checked(weights)
    if weights.shape != gradients.shape:
        raise ShapeError(
            f"weights have the shape {tuple(weights.shape)}; value {tuple(value.shape)} and grad_output "
            f"{tuple(grad_output.shape)} are those of weights {tuple(gradients.shape)}"
        )
    return weights * gradients.to(torch.promote_types(gradients.dtype, weights.dtype))


@dataclass(frozen=True)
class Values:
    """The lens that shows the values which the weights are put on, (..., key heads, N, Dv), detached, as they are.

    >>> import torch, regard
    >>> values, v = regard.heads.Values(), torch.tensor([[1.0], [2.0]])
    >>> regard.observe(torch.zeros(1, 4), torch.zeros(2, 4), v, values)[values]
    tensor([[1.],
            [2.]])
    """

    def start(self, problem: Problem) -> _Values:
        """Begin to look."""
        return _Values()


class _Values:
    """Values that are read from the problem."""

    reductions = ()

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return problem.value.detach()


@contextmanager
def catching_gradients(
    model: nn.Module, outputs: Mapping[str, nn.Module | str] | None = None
) -> Iterator[Mapping[str, list[Tensor]]]:
    """Run a model, and keep the gradient of each attention's output, once something runs backward from it.

    `gradients[name]` has one (batch, heads, M, Dv) for each call, in their order, after the backward pass, which may
    come when the block has ended; those of several passes add up, as in `.grad`. With `Values` and `Weights` from
    `regard.huggingface.observing` it makes `gradient_times_weights` of a whole model, whatever kernel computes it.

    Args:
        model: what the block runs, with autograd.
        outputs: the output projection of attention modules that do not show which it is, as in `ablating`.

    Raises:
        ConfigurationError: no attention module whose heads can be told apart.

    >>> import torch, regard
    >>> model, x = torch.nn.Sequential(regard.nn.Attention(regard.nn.Projections(4, num_heads=2))), torch.randn(1, 3, 4)
    >>> with catching_gradients(model) as gradients:
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
            hook = _Catching(projection, gradients[name])
            hooks.callback(projection.module.register_forward_pre_hook(hook).remove)
        yield gradients


class _Catching:
    """A hook that keeps the gradient of an output projection's input, head by head, in the order of the calls."""

    def __init__(self, projection: HeadProjection, caught: list[Tensor]) -> None:
        self.projection, self.caught = projection, caught

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tensor, place = inputs[0], len(self.caught)
        if not torch.is_grad_enabled():
            return inputs
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        parts = (self.projection.heads, self.projection.width)
        self.caught.append(torch.zeros_like(tensor).unflatten(-1, parts).transpose(-2, -3))

        def keep(gradient: Tensor) -> None:
            self.caught[place] = self.caught[place] + gradient.unflatten(-1, parts).transpose(-2, -3)

        tensor.register_hook(keep)
        return (tensor, *inputs[1:])


def _unfitting(value: Tensor, grad_output: Tensor) -> ShapeError:
    return ShapeError(
        f"value has the shape {tuple(value.shape)} and grad_output {tuple(grad_output.shape)}; they need (..., key "
        "heads, N, Dv) and (..., heads, M, Dv), with key heads that divide the heads"
    )
