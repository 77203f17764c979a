"""What a lens is: reductions of the weights that are started, filled by tiles or by native code, and shown.

Whether what a lens shows has room on the device: said before anything is computed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from .. import native
from ..core.problem import Problem
from ..errors import ConfigurationError

Shown = TypeVar("Shown")
Shown_co = TypeVar("Shown_co", covariant=True)


@dataclass(frozen=True, eq=False, slots=True)
class Tile:
    """The weights of some batches and rows, of all heads, on some columns; reductions write nothing into it.

    Shapes: weights (b, H, m, n), in float32 at least, 0 where a pair is masked; terms, weights · log₂ weights, is
    likewise, and is there only where some reduction asks for it. All leading axes together are the batches, a missing
    head axis is one head.
    """

    weights: Tensor
    terms: Tensor | None
    batch: slice
    rows: slice
    columns: slice


class Reduction(Protocol):
    """Numbers that all weights of a problem are added to.

    terms: whether it reads `Tile.terms`.
    """

    @property
    def terms(self) -> bool: ...

    def add(self, tile: Tile) -> None:
        """Take in one more tile. A row that attends to NaN is not in it: its weights are 0 here.

        They are the tiles that the mask leaves, each once, row by row and in a row from left to right.
        """
        ...


@runtime_checkable
class NativeReduction(Reduction, Protocol):
    """One that native code can do as well, where it can weigh the problem."""

    def native(self) -> native.Reduction | None:
        """The numbers as native code adds to them; None where it has no word for how these are asked for."""
        ...


class Look(Protocol[Shown_co]):
    """A lens at work on one problem: what it needs of the weights, if anything, and how it is shown."""

    @property
    def reductions(self) -> Sequence[Reduction]: ...

    def finish(self, problem: Problem, lse: Tensor) -> Shown_co:
        """What is shown, once all weights are in the reductions.

        The problem has no NaN any more, a row that attends to it the lse NaN.
        """
        ...


@runtime_checkable
class Lens(Protocol[Shown_co]):
    """What is shown of the weights of a problem, exact, from its scores and the log-sum-exp of its rows."""

    def start(self, problem: Problem) -> Look[Shown_co]:
        """Begin to look; what does not fit the problem is said here, before anything is computed."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """The sizes (B, H, M, N) of a problem's weights as tiles have them, and the way back to its own axes."""

    leading: torch.Size
    batch: int
    heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, problem: Problem) -> Frame:
        """The frame of a problem."""
        leading = problem.weights_shape[:-2]
        return cls(
            leading=leading,
            batch=problem.batch.numel(),
            heads=leading[-1] if problem.heads else 1,
            queries=problem.queries,
            keys=problem.keys,
            dtype=torch.promote_types(problem.value.dtype, torch.float32),
            device=problem.value.device,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a number as it is shown."""
        return self.dtype.itemsize

    @property
    def itemsize_of_sums(self) -> int:
        """Bytes of a number of `zeros`, and of what is shown of it beside."""
        return self._of_sums.itemsize + (self.itemsize if self._of_sums != self.dtype else 0)

    @property
    def _of_sums(self) -> torch.dtype:
        return self.dtype if self.device.type == "mps" else torch.float64

    def zeros(self, *sizes: int) -> Tensor:
        """Sums of nothing yet, (B, H, *sizes), in float64 where the device has it."""
        return torch.zeros(self.batch, self.heads, *sizes, dtype=self._of_sums, device=self.device)

    def shown(self, tensor: Tensor) -> Tensor:
        """(B, H, ...) as the problem has its axes, (..., heads, ...), in float32 at least."""
        tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return tensor.reshape(*self.leading, *tensor.shape[2:])

    def broken(self, lse: Tensor) -> Tensor:
        """Which rows attend to NaN or infinity, so that all their weights are NaN: (B, H, M)."""
        return (lse.isnan() | lse.isposinf()).reshape(self.batch, self.heads, self.queries)

    def positions(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Where queries and keys sit: (B or 1, M) and (B or 1, N), int64."""
        grid, batch = problem.grid(), problem.batch

        def flat(positions: Tensor) -> Tensor:
            if positions.ndim == 1:
                return positions.long()[None]
            return positions.long().expand(*batch, positions.shape[-1]).reshape(self.batch, -1)

        return flat(grid.query_positions), flat(grid.key_positions)


def of_batch(tensor: Tensor, batch: slice) -> Tensor:
    """Some batches of a tensor (B or 1, ...)."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


SMALLER = (
    "look at a smaller rectangle, such as Weights(slice(0, 256), slice(0, 256)), at Pooled((256, 256)), or at TopK(8)"
)


def check_memory(
    asked: str, problem: Problem, sizes: tuple[int, int], *, each: int, beside: int = 0, instead: str = SMALLER
) -> None:
    """Say so where a table of `sizes` for every head takes more memory than the device has.

    Args:
        asked: what the table is, with {} where its sizes go.
        problem: it has the heads and the device.
        sizes: rows and columns.
        each: bytes of one number of the table.
        beside: bytes in all for what else is needed.
        instead: what to ask for.

    Raises:
        ConfigurationError: it does.
    """
    leading, (rows, columns) = problem.weights_shape[:-2].numel(), sizes
    needed, there = leading * rows * columns * each + beside, memory(problem.value.device)
    if there is not None and needed > there:
        raise ConfigurationError(
            f"{asked.format(f'{rows:,} × {columns:,}')} and {leading:,} heads in all needs {needed / 1e9:,.1f} GB, and "
            f"{problem.value.device} has {there / 1e9:,.1f} GB: {instead}"
        )


def memory(device: torch.device) -> int | None:
    """How many bytes a device has in all, if that can be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None  # no POSIX system
