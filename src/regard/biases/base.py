"""What every bias is: numbers added to the scores before the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor

from ..core.grid import Grid, broadcast_together
from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError, DtypeError, ShapeError


class Bias(ABC):
    """What is added to the score of each pair. Subclasses are dataclasses, and say `values`.

    Autograd goes through `values` by itself. A kernel that works tile by tile without a graph asks for the gradient
    instead: it takes the `parameters`, computes with `with_parameters` over detached ones, and has each tile
    `accumulate` into one tensor a parameter. What is here does that for any dataclass whose fields are its tensors.
    """

    @abstractmethod
    def values(self, grid: Grid) -> Tensor:
        """The numbers on the pairs of a grid: floating point, broadcastable to (..., heads, M, N)."""

    def parameters(self) -> tuple[Tensor, ...]:
        """The floating-point tensors that the bias is made from, whether or not they ask for a gradient."""
        return tuple(getattr(self, name) for name in self._tensor_fields())

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        """The same bias over other tensors, as many as `parameters` gives and in their order."""
        instance: Any = self
        return replace(instance, **dict(zip(self._tensor_fields(), tensors, strict=True)))

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient of Σ upstream · values(grid) in each of the parameters to the tensors of `into`, in place.

        Shapes: upstream is the whole tile, (..., heads, M, N); `into` has a tensor of its parameter's shape for each
        of the parameters, or None where its gradient is not wanted. Sums are in float32 at least.
        """
        if wanted(into):
            with torch.enable_grad():
                held = leaves(self, into)
                values = self.with_parameters(held).values(grid)
            push(values, summed_to(upstream, values.shape), held, into)

    def _tensor_fields(self) -> list[str]:
        if not is_dataclass(self):
            raise ConfigurationError(
                f"{type(self).__name__} is a bias, but no dataclass: make it one whose fields are its tensors, or give "
                "it parameters() and with_parameters(tensors) of its own"
            )
        return [field.name for field in fields(self) if is_floating(getattr(self, field.name))]

    def __add__(self, other: Bias | Tensor) -> Bias:
        return Sum(self, as_bias(other))


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """Two biases added."""

    left: Bias
    right: Bias

    def values(self, grid: Grid) -> Tensor:
        left, right = self.left.values(grid), self.right.values(grid)
        if not broadcast_together(left, right):
            raise ShapeError(
                f"{self.left!r} has the shape {tuple(left.shape)} and {self.right!r} {tuple(right.shape)} (batch and "
                "heads, queries, keys): they do not broadcast"
            )
        return left + right

    def parameters(self) -> tuple[Tensor, ...]:
        """Those of the left bias, then those of the right one; a tensor that both hold is there twice."""
        return (*self.left.parameters(), *self.right.parameters())

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        count = len(self.left.parameters())
        left, right = self.left.with_parameters(tensors[:count]), self.right.with_parameters(tensors[count:])
        return replace(self, left=left, right=right)

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        count = len(self.left.parameters())
        self.left.accumulate(grid, upstream, into[:count])
        self.right.accumulate(grid, upstream, into[count:])

    def __repr__(self) -> str:
        return f"{self.left!r} + {self.right!r}"


@dataclass(frozen=True, eq=False, repr=False)
class TensorBias(Bias):
    """The numbers of a tensor, with gradient."""

    pairs: Tensor

    def values(self, grid: Grid) -> Tensor:
        return grid.cut(self.pairs)

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """The tile's part alone is written to: no tensor over all pairs for each tile."""
        (target,) = into
        if target is not None:
            tile = grid.cut(target)
            tile += summed_to(upstream, tile.shape)

    def __repr__(self) -> str:
        return f"tensor({described(self.pairs)})"


def tensor(pairs: Tensor) -> Bias:
    """Numbers added to the scores, B in softmax(f(Q, K) + B); gradients flow into them.

    Shapes: broadcastable to the weights, (..., heads, M, N).

    Raises:
        DtypeError: the tensor is not floating point (booleans are a mask).

    >>> import torch
    >>> from regard import biases
    >>> biases.tensor(torch.zeros(4, 4))
    tensor(<float32 (4, 4)>)
    """
    if not is_floating(pairs):
        has = pairs.dtype if isinstance(pairs, Tensor) else f"a {type(pairs).__name__}"
        raise DtypeError(
            f"a bias needs a floating-point tensor; this is {has}. Booleans that say which pairs exist go to "
            "mask=masks.where(keep=...)"
        )
    return TensorBias(pairs if pairs.ndim >= 2 else pairs.reshape(1, -1))


def as_bias(bias: Bias | Tensor) -> Bias:
    """A bias as it is, a floating-point tensor as a bias."""
    return bias if isinstance(bias, Bias) else tensor(bias)


def to_float(center: Tensor | float) -> Tensor:
    """A number or a tensor as floating point."""
    values = torch.as_tensor(center)
    return values if values.is_floating_point() else values.float()


def is_floating(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor that a gradient can flow into."""
    return isinstance(value, Tensor) and value.is_floating_point()


def described(held: Tensor) -> str:
    """A tensor by dtype and shape, as it stands in the `repr` of a bias."""
    return f"<{str(held.dtype).removeprefix('torch.')} {tuple(held.shape)}>"


def wanted(into: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of any parameter is wanted."""
    return any(target is not None for target in into)


def leaves(bias: Bias, into: Sequence[Tensor | None]) -> list[Tensor]:
    """The parameters without their history, those with a gradient that is wanted as leaves of a graph of their own.

    Half precision is widened, so that the gradient is not rounded before it is added.
    """
    return [
        at_least_float32(held.detach()).requires_grad_(target is not None)
        for held, target in zip(bias.parameters(), into, strict=True)
    ]


def push(output: Tensor, upstream: Tensor, held: Sequence[Tensor], into: Sequence[Tensor | None]) -> None:
    """Add the gradient of Σ upstream · output in each of the `leaves` to its tensor of `into`."""
    pairs = [(leaf, target) for leaf, target in zip(held, into, strict=True) if target is not None]
    if not output.requires_grad:
        return  # on this tile no parameter plays a part
    gradients = torch.autograd.grad(output, [leaf for leaf, _ in pairs], upstream.to(output.dtype), allow_unused=True)
    for (_, target), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:
            target += gradient


def summed_to(upstream: Tensor, shape: torch.Size) -> Tensor:
    """Sum a gradient over the axes that its values were broadcast along, in float32 at least.

    >>> summed_to(torch.ones(2, 3, 4), torch.Size((1, 1, 3, 1))).flatten()
    tensor([8., 8., 8.])
    """
    more = max(len(shape) - upstream.ndim, 0)
    return at_least_float32(upstream).sum_to_size(shape[more:]).reshape(shape)
