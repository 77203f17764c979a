"""What every bias is: numbers added to the scores before the softmax."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from ..tiles import Grid, broadcast_together


class Bias(ABC):
    """What is added to the score of each pair. Subclasses are final and say `values`."""

    @abstractmethod
    def values(self, grid: Grid) -> Tensor:
        """The numbers on the pairs of a grid: floating point, broadcastable to (..., heads, M, N)."""

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

    def __repr__(self) -> str:
        return f"{self.left!r} + {self.right!r}"


@dataclass(frozen=True, eq=False, repr=False)
class TensorBias(Bias):
    """The numbers of a tensor, with gradient."""

    pairs: Tensor

    def values(self, grid: Grid) -> Tensor:
        return grid.cut(self.pairs)

    def __repr__(self) -> str:
        return f"tensor(<{str(self.pairs.dtype).removeprefix('torch.')} {tuple(self.pairs.shape)}>)"


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
    if not isinstance(pairs, Tensor) or not pairs.is_floating_point():
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
