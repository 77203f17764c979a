"""Marks of an exercise about one function: its formula in float64, forward and gradient, on drawn numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..testing import Expected, fault
from .oracle_cases import tensor_of

Arguments = Mapping[str, Tensor]
ROUNDINGS = 2
"""Approximations on changed arguments, beside the one on the arguments themselves."""


@dataclass(frozen=True)
class FormulaCases:
    """A function that a file defines, and what it has to compute.

    The error budget is that of `regard.testing`: twice the error of the formula itself in float32, on the arguments and
    on roundings of them, and one rounding more.

    function: its name. formula: the same in the precision of its arguments, written otherwise than the solution.
    draws: the arguments of each case, a shape for numbers of mean 0 and variance 1, or a tensor to be passed as it is.
    small: the arguments of the example that is shown where an answer is wrong.
    """

    function: str
    formula: Callable[..., Tensor]
    draws: Sequence[Mapping[str, tuple[int, ...] | Tensor]]
    small: Arguments

    def __len__(self) -> int:
        return len(self.draws)

    def faults(self, names: Mapping[str, Any]) -> Iterator[str]:
        """What differs from the formula, by case: the result, and where it is right the gradients."""
        for drawn in self.draws:
            arguments = _drawn(drawn)
            case = ", ".join(f"{name} {'x'.join(map(str, tensor.shape))}" for name, tensor in arguments.items())
            yield from (f"{case}: {one}" for one in self._faults_of(names, arguments))

    def results(self, names: Mapping[str, Any]) -> Iterator[Tensor]:
        """The result of each case."""
        for drawn in self.draws:
            yield tensor_of(names[self.function](**_drawn(drawn))).detach()

    def example(self, names: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """A small problem of whole numbers: what goes in, what comes out as "yours", and what is "right"."""
        with torch.no_grad():
            yours = tensor_of(names[self.function](**self.small))
            right = self.formula(**_in(torch.float64, self.small)).float()
        return {**self.small, "yours": yours, "right": right}

    def _faults_of(self, names: Mapping[str, Any], arguments: Arguments) -> list[str]:
        leaves = {name: tensor for name, tensor in arguments.items() if tensor.is_floating_point()}
        given = {name: tensor.requires_grad_(name in leaves) for name, tensor in arguments.items()}
        result = tensor_of(names[self.function](**given))
        truth, true_gradients = self._computed(_in(torch.float64, given))
        near = [self._computed(rounding) for rounding in _roundings(given)]
        if found := fault(result, Expected(truth, torch.float32, [output for output, _ in near])):
            return [f"output: {found}"]
        own = torch.autograd.grad(result, list(leaves.values()), _upstream(result), materialize_grads=True)
        # A gradient may be a difference that cancels; its terms are as large as the other gradients.
        magnitude = max(gradient.abs().mean().item() for gradient in true_gradients)
        found = []
        for name, gradient, true, *approximations in zip(
            leaves, own, true_gradients, *(gradients for _, gradients in near), strict=True
        ):
            if text := fault(gradient, Expected(true, torch.float32, approximations, magnitude)):
                found.append(f"gradient of {name}: {text}")
        return found

    def _computed(self, arguments: Arguments) -> tuple[Tensor, Sequence[Tensor]]:
        """The result of the formula, and its gradients."""
        result = self.formula(**arguments)
        leaves = [tensor for tensor in arguments.values() if tensor.requires_grad]
        return result.detach(), torch.autograd.grad(result, leaves, _upstream(result))


def _drawn(drawn: Mapping[str, tuple[int, ...] | Tensor]) -> dict[str, Tensor]:
    """The arguments of a case, the same each time."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(drawn).encode()))
    return {
        name: shape.clone() if isinstance(shape, Tensor) else torch.randn(shape, generator=generator)
        for name, shape in drawn.items()
    }


def _in(dtype: torch.dtype, arguments: Arguments) -> dict[str, Tensor]:
    """The arguments, of which those that are no whole numbers are leaves of that dtype."""
    return {
        name: tensor.detach().to(dtype).requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in arguments.items()
    }


def _roundings(arguments: Arguments) -> Iterator[Arguments]:
    """The arguments in float32, and each number of them one rounding larger or smaller, at random."""
    yield _in(torch.float32, arguments)
    generator = torch.Generator().manual_seed(0)
    for _ in range(ROUNDINGS):
        changes = {name: torch.randint(0, 2, tensor.shape, generator=generator) for name, tensor in arguments.items()}
        rounded = {
            name: tensor * (1 + torch.finfo(torch.float32).eps * (changes[name] - 0.5))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in arguments.items()
        }
        yield _in(torch.float32, rounded)


def _upstream(result: Tensor) -> Tensor:
    """The gradient that comes from above: the same numbers in each precision."""
    numbers = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(result.dtype)
