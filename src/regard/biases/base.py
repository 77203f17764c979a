"""Base class of biases: numbers added to the scores before the softmax, as a function of positions and parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import Tensor

from ..core.grid import Grid, broadcast_together
from ..core.mixed_devices import refuse_mixed_devices
from ..core.score_forms import at_least_float32
from ..core.torch_modes import is_causal_bias
from ..errors import ConfigurationError, DtypeError, RegardError, ShapeError
from ..utils.other_types import name_type

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ..core.problem import Problem


class Bias(ABC):
    """A number added to the score of each pair of query and key. Subclasses are dataclasses that implement `values`.

    Autograd differentiates `values` directly. A kernel that works tile by tile without a graph computes the gradient
    through `parameters`, `with_parameters` and `accumulate`: it evaluates the bias over detached parameters and has
    each tile add its gradient to one tensor per parameter. The methods here do that for any dataclass whose
    floating-point tensor fields are its parameters.

    Everything else evaluates a bias through `evaluate`, which checks the result.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from regard.biases import Bias
    >>> from regard.core.grid import Grid
    >>> @dataclass(frozen=True, eq=False)
    ... class SamePosition(Bias):
    ...     weight: torch.Tensor
    ...     def values(self, grid):
    ...         return self.weight * (grid.query == grid.key)
    >>> SamePosition(torch.tensor(2.0)).evaluate(Grid.from_lengths(2, 2))
    tensor([[2., 0.],
            [0., 2.]])
    """

    @property
    def by_position(self) -> bool:
        """Whether positions decide, so that a shard of a sequence has the values of the whole; not of a tensor."""
        return True

    def bound(self, problem: Problem) -> Bias:
        """The bias of one call, with what it reads of its queries, keys and positions; itself unless content decides.

        `regard.attention` asks for it once its other arguments are checked.
        """
        return self

    def structure(self, problem: Problem) -> Hashable:
        """What the kernels that can compute it depend on for a problem, beside its class and its parameters' sizes."""
        return None

    @abstractmethod
    def values(self, grid: Grid) -> Tensor:
        """The formula: the numbers for the pairs of a grid, floating point, broadcastable to (..., heads, M, N)."""

    def evaluate(self, grid: Grid) -> Tensor:
        """The checked result of `values`: floating point, broadcastable to (..., heads, M, N).

        Raises:
            ConfigurationError: `values` fails, or returns anything but a floating-point tensor over the pairs.
        """
        try:
            values = self.values(grid)
        except (RegardError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a bias may be the user's, and raise anything
            refuse_mixed_devices(self, error, grid.device)
            raise ConfigurationError(
                f"{self!r} cannot be evaluated: {type(error).__name__}: {error}. `values` gets the positions of many "
                "pairs as tensors of whole numbers, `grid.query` as a column and `grid.key` as a row, and returns a "
                "floating-point tensor"
            ) from error
        if not is_floating(values) or not _is_over(values.shape, *grid.shape):
            has = values.dtype if isinstance(values, Tensor) else f"a {type(values).__name__}"
            shape = f" of shape {tuple(values.shape)}" if isinstance(values, Tensor) else ""
            raise ConfigurationError(
                f"{self!r}: values returned {has}{shape} for {grid.shape[0]} queries and {grid.shape[1]} keys; it "
                "needs a floating-point tensor that broadcasts to (..., heads, queries, keys)"
            )
        return values if values.ndim >= 2 else values.reshape(1, -1)

    def parameters(self) -> tuple[Tensor, ...]:
        """The floating-point tensors that the bias depends on, with or without `requires_grad`."""
        return tuple(getattr(self, name) for name in self._tensor_fields())

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        """A copy with other tensors as parameters, in the order of `parameters()`."""
        instance: Any = self
        return replace(instance, **dict(zip(self._tensor_fields(), tensors, strict=True)))

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient of Σ upstream · values(grid) in each of the parameters to the tensors of `into`, in place.

        Shapes: upstream is the whole tile, (..., heads, M, N); `into` has one tensor of its parameter's shape per
        parameter, or None for a gradient that is not needed. Sums are in float32 at least.
        """
        if any_needed(into):
            with torch.enable_grad():
                parameters = leaves(self, into)
                values = self.with_parameters(parameters).values(grid)
            add_gradients(values, summed_to(upstream, values.shape), parameters, into)

    def __getstate__(self) -> object:
        """What copies and files get: the fields, without what is remembered of the bias."""
        state = super().__getstate__()
        if isinstance(state, dict):
            return {name: value for name, value in state.items() if not name.startswith("_memo")}
        return state

    def _tensor_fields(self) -> list[str]:
        if not is_dataclass(self):
            raise ConfigurationError(
                f"{type(self).__name__} is a bias, but not a dataclass: make it a dataclass whose fields are its "
                "tensors, or implement parameters() and with_parameters(tensors)"
            )
        return [field.name for field in fields(self) if is_floating(getattr(self, field.name))]

    def __add__(self, other: Bias | Tensor) -> Bias:
        return Sum(self, as_bias(other))


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Bias):
    """The sum of two biases."""

    left: Bias
    right: Bias

    @property
    def by_position(self) -> bool:
        return self.left.by_position and self.right.by_position

    def bound(self, problem: Problem) -> Bias:
        return replace(self, left=self.left.bound(problem), right=self.right.bound(problem))

    def values(self, grid: Grid) -> Tensor:
        left, right = self.left.evaluate(grid), self.right.evaluate(grid)
        if not broadcast_together(left, right):
            raise ShapeError(
                f"{self.left!r} has the shape {tuple(left.shape)} and {self.right!r} {tuple(right.shape)} (batch and "
                "heads, queries, keys): they do not broadcast"
            )
        return left + right

    def parameters(self) -> tuple[Tensor, ...]:
        """Parameters of the left bias, then of the right one; a tensor that both use is listed twice."""
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


def bias_parts(bias: Bias | None) -> list[Bias]:
    """The biases that a sum consists of, from left to right."""
    if bias is None:
        return []
    return [*bias_parts(bias.left), *bias_parts(bias.right)] if isinstance(bias, Sum) else [bias]


@dataclass(frozen=True, eq=False, repr=False)
class TensorBias(Bias):
    """A bias from a tensor over pairs; gradients flow into the tensor."""

    pairs: Tensor

    @property
    def by_position(self) -> bool:
        return False

    def values(self, grid: Grid) -> Tensor:
        return grid.cut(self.pairs)

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient to the tile's slice of the tensor alone, without a tensor over all pairs per tile."""
        (target,) = into
        if target is not None:
            tile = grid.cut(target)
            tile += summed_to(upstream, tile.shape)

    def __repr__(self) -> str:
        return f"tensor({describe_tensor(self.pairs)})"


def tensor(pairs: Tensor) -> Bias:
    """A tensor added to the scores: B in softmax(f(Q, K) + B); gradients flow into it.

    It is not copied, and nothing of it is remembered: each call sees what was written to it, in any way. As torch's own
    operations, a backward pass refuses one that was written to since the forward pass.

    Shapes: broadcastable to the weights, (..., heads, M, N).

    Raises:
        DtypeError: the tensor is not floating point (booleans are a mask).

    >>> import torch
    >>> from regard import biases
    >>> biases.tensor(torch.zeros(4, 4))
    tensor(<float32 (4, 4)>)
    """
    if is_causal_bias(pairs):
        raise DtypeError(
            "torch's CausalBias has no numbers to add: it is a mask. Give it to mask=, or read it with masks.from_sdpa"
        )
    if not is_floating(pairs):
        has = (
            pairs.dtype if isinstance(pairs, Tensor) else name_type("bias", pairs, of_function="biases.from_mod(bias)")
        )
        raise DtypeError(
            f"a bias needs a floating-point tensor; this is {has}. Booleans that say which pairs exist go to "
            "mask=masks.where(keep=...)"
        )
    return TensorBias(pairs if pairs.ndim >= 2 else pairs.reshape(1, -1))


def as_bias(bias: Bias | Tensor) -> Bias:
    """A `Bias` unchanged; a floating-point tensor as a `TensorBias`."""
    return bias if isinstance(bias, Bias) else tensor(bias)


def to_float(number: Tensor | float) -> Tensor:
    """A number or a tensor as a floating-point tensor."""
    values = torch.as_tensor(number)
    return values if values.is_floating_point() else values.float()


def is_floating(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a floating-point tensor, which can have a gradient."""
    return isinstance(value, Tensor) and value.is_floating_point()


def describe_tensor(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, for the `repr` of a bias.

    >>> describe_tensor(torch.zeros(2, 3))
    '<float32 (2, 3)>'
    """
    return f"<{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}>"


def any_needed(into: Sequence[Tensor | None]) -> bool:
    """Whether the gradient of any parameter is needed."""
    return any(target is not None for target in into)


def leaves(bias: Bias, into: Sequence[Tensor | None]) -> list[Tensor]:
    """Detached copies of the parameters, with `requires_grad` where `into` has a tensor for the gradient.

    Half precision is widened to float32, so that the gradient is not rounded before it is added.
    """
    return [
        at_least_float32(parameter.detach()).requires_grad_(target is not None)
        for parameter, target in zip(bias.parameters(), into, strict=True)
    ]


def add_gradients(
    output: Tensor, upstream: Tensor, parameters: Sequence[Tensor], into: Sequence[Tensor | None]
) -> None:
    """Add the gradient of Σ upstream · output in each of `leaves(bias, into)` to its tensor of `into`, in place."""
    pairs = [(leaf, target) for leaf, target in zip(parameters, into, strict=True) if target is not None]
    if not output.requires_grad:
        return  # on this tile no parameter plays a part
    gradients = torch.autograd.grad(output, [leaf for leaf, _ in pairs], upstream.to(output.dtype), allow_unused=True)
    for (_, target), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:
            target += gradient


def summed_to(upstream: Tensor, shape: Sequence[int]) -> Tensor:
    """Sum a gradient over the axes along which its values were broadcast, in float32 at least.

    >>> summed_to(torch.ones(2, 3, 4), torch.Size((1, 1, 3, 1))).flatten()
    tensor([8., 8., 8.])
    """
    if upstream.shape == shape:
        return at_least_float32(upstream)
    more = max(len(shape) - upstream.ndim, 0)
    return at_least_float32(upstream).sum_to_size(shape[more:]).reshape(shape)


def _is_over(shape: torch.Size, queries: int, keys: int) -> bool:
    """Whether the last two axes broadcast to (M, N)."""
    return (not shape or shape[-1] in (1, keys)) and (len(shape) < 2 or shape[-2] in (1, queries))
