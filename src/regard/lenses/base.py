"""The protocol of a lens: `Lens`, its running `LensState`, and the `Reduction`s that sum over the weights.

A `ShardedLens` can also be computed by several processes, each over the rows of its `RowShard`.
`WeightsLayout` has the sizes, dtype and device of a call's weights, and `check_memory` refuses results that do not fit
into the memory of the device.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..core.grid import Grid
from ..core.problem import Problem
from ..errors import ConfigurationError
from .forms import WeightForm

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


@runtime_checkable
class Lens(Protocol[Result_co]):
    """A statistic of the attention weights: hashable settings, and `start`, which returns the state of one run.

    Equal lenses share one result: `regard.observe(..., lens)[lens]`. A frozen dataclass is the usual form.

    The largest weight of each head, in memory independent of the lengths:

    >>> import torch, regard
    >>> from dataclasses import dataclass
    >>> class PeakState:
    ...     needs_entropy_terms = False
    ...     def __init__(self, layout):
    ...         self.layout, self.peaks, self.reductions = layout, layout.zeros(), (self,)
    ...     def add(self, tile):
    ...         peaks = self.peaks[tile.batch]
    ...         torch.maximum(peaks, tile.weights.amax((-2, -1)), out=peaks)
    ...     def finish(self, problem, lse):
    ...         return self.layout.to_result(self.peaks)
    >>> @dataclass(frozen=True)
    ... class Peak:
    ...     def start(self, problem):
    ...         return PeakState(regard.lenses.WeightsLayout.from_problem(problem))
    >>> query = key = torch.eye(3).expand(1, 2, 3, 3)
    >>> regard.observe(query, key, key, Peak(), mask=regard.masks.window(0, 1))[Peak()]
    tensor([[1., 1.]])
    """

    def start(self, problem: Problem) -> LensState[Result_co]:
        """The state for one problem. Settings that do not fit the problem raise here, before anything is computed."""
        ...


class LensState(Protocol[Result_co]):
    """One run of a lens: the reductions that read the weights, and `finish`, which turns them into the result.

    reductions may be empty: the result is then computed from the problem and its log-sum-exp alone.
    """

    @property
    def reductions(self) -> Sequence[Reduction]: ...

    def finish(self, problem: Problem, lse: Tensor) -> Result_co:
        """The result, after every tile was passed to the reductions.

        problem: the call, with NaN and infinity in its tensors replaced by 0. lse (..., heads, M): the log-sum-exp of
        each row, -inf where a row attends to nothing, NaN where it attends to NaN.
        """
        ...


class Reduction(Protocol):
    """A sum, maximum or other statistic that is accumulated over tiles of the weights.

    needs_entropy_terms: whether `add` reads `WeightTile.entropy_terms`.
    """

    @property
    def needs_entropy_terms(self) -> bool: ...

    def add(self, tile: WeightTile) -> None:
        """Accumulate one tile. Weights of rows that attend to NaN are 0 here.

        Each tile that the mask does not empty comes once, row of tiles by row of tiles, from left to right.
        """
        ...


class RowShard(Protocol):
    """The rows of the weights that one of several processes computes, and sums and maxima over all processes."""

    @property
    def positions(self) -> range:
        """The positions of all rows, of all processes."""
        ...

    def select(self, rows: Tensor) -> Tensor:
        """This process's entries, in the order of its rows, of a tensor over all rows (..., all rows)."""
        ...

    def indices(self, rows: slice) -> slice:
        """The indices among all rows of the rows of a tile."""
        ...

    def gather_rows(self, rows: Tensor, chosen: range) -> Tensor:
        """Chosen rows of all processes, of a tensor over each one's own (..., own rows, ·), in every process."""
        ...

    def gather_keys(self, keys: Tensor, chosen: range) -> Tensor:
        """Chosen keys of all processes, of a tensor over each one's own (..., own keys, ·), in every process."""
        ...

    def finite(self, problem: Problem) -> Problem:
        """A problem of any rows and keys without NaN and infinity, whose mask leaves out the scores of -infinity."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes; each of them has to call it."""
        ...

    def maximum(self, tensor: Tensor) -> Tensor:
        """The maximum over all processes; each of them has to call it."""
        ...


@runtime_checkable
class ShardedLens(Lens[Result_co], Protocol[Result_co]):
    """A lens whose result several processes can compute, each from the weights of some rows.

    A lens with one result for each row only needs `def start_shard(self, problem, shard): return self.start(problem)`.
    One that reduces over rows sums its accumulators over all processes in `finish`, by `WeightsLayout.total` or
    `WeightsLayout.maximum` of the layout `WeightsLayout.from_problem(problem, shard)`.
    """

    def start_shard(self, problem: Problem, shard: RowShard) -> LensState[Result_co]:
        """The state for this process's rows.

        problem: the rows of this process at their positions, over all keys, whose features and values are left out
            (they have no columns). Tiles come in any order, and their columns may have a step. `finish` then gets the
            problem over this process's own keys.
        """
        ...


@runtime_checkable
class NativeReduction(Reduction, Protocol):
    """A reduction that the C code can compute too; `add` is then not called."""

    def native(self) -> WeightForm | None:
        """The tensors that the C code accumulates into; None where it does not support these settings."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class WeightTile:
    """The weights of a rectangle: some batches, some rows and some columns, of all heads. Read only.

    Shapes: weights (b, H, m, n), in float32 at least, 0 where a pair is masked; entropy_terms, w · log₂ w, the same,
    and None unless a reduction needs them. All leading axes together are the batch; without a head axis H is 1.
    """

    weights: Tensor
    entropy_terms: Tensor | None
    batch: slice
    rows: slice
    columns: slice


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """The sizes (B, H, M, N), dtype and device of a problem's weights, as tiles have them.

    leading: the leading axes of the problem's own weights, which `to_result` restores. shard: which of all rows these
    are, where other processes have the others.
    """

    leading: torch.Size
    batch: int
    heads: int
    queries: int
    keys: int
    dtype: torch.dtype
    device: torch.device
    shard: RowShard | None = None

    @classmethod
    def from_problem(cls, problem: Problem, shard: RowShard | None = None) -> WeightsLayout:
        """The layout of a problem's weights, in float32 at least."""
        leading = problem.weights_shape[:-2]
        return cls(
            leading=leading,
            batch=problem.batch.numel(),
            heads=leading[-1] if problem.heads else 1,
            queries=problem.queries,
            keys=problem.keys,
            dtype=torch.promote_types(problem.value.dtype, torch.float32),
            device=problem.value.device,
            shard=shard,
        )

    @property
    def all_queries(self) -> int:
        """The number of rows of all processes."""
        return self.queries if self.shard is None else len(self.shard.positions)

    def own_rows(self, rows: Tensor) -> Tensor:
        """The entries for the rows of this layout of a tensor over all rows (..., all rows)."""
        return rows if self.shard is None else self.shard.select(rows)

    def row_indices(self, rows: slice) -> slice:
        """The indices among all rows of the rows of a tile."""
        return rows if self.shard is None else self.shard.indices(rows)

    def total(self, sums: Tensor) -> Tensor:
        """Sums over the rows of this layout as sums over all rows."""
        return sums if self.shard is None else self.shard.sum(sums)

    def maximum(self, maxima: Tensor) -> Tensor:
        """Maxima over the rows of this layout as maxima over all rows."""
        return maxima if self.shard is None else self.shard.maximum(maxima)

    @property
    def result_itemsize(self) -> int:
        """Bytes of one number of a result."""
        return self.dtype.itemsize

    @property
    def sum_itemsize(self) -> int:
        """Bytes of one number of `zeros`, plus those of its copy in the dtype of the result."""
        return self._sum_dtype.itemsize + (self.result_itemsize if self._sum_dtype != self.dtype else 0)

    @property
    def _sum_dtype(self) -> torch.dtype:
        return self.dtype if self.device.type == "mps" else torch.float64

    def zeros(self, *sizes: int) -> Tensor:
        """Accumulators (B, H, *sizes), all 0, in float64 where the device supports it."""
        return torch.zeros(self.batch, self.heads, *sizes, dtype=self._sum_dtype, device=self.device)

    def to_result(self, tensor: Tensor) -> Tensor:
        """Reshape (B, H, ...) to the problem's own axes (..., heads, ...); floating-point numbers get `dtype`."""
        tensor = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        return tensor.reshape((*self.leading, *tensor.shape[2:]))

    def nan_rows(self, lse: Tensor) -> Tensor:
        """Which rows attend to NaN or infinity, so that all their weights are NaN: bool (B, H, M)."""
        return (lse.isnan() | lse.isposinf()).reshape(self.batch, self.heads, self.queries)

    def positions(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The positions of queries and keys: int64, (B or 1, M) and (B or 1, N)."""
        return self._flat_positions(problem, problem.grid())

    def positions_on_host(self, problem: Problem) -> tuple[Tensor, Tensor] | None:
        """The same on the CPU; None where some are a tensor on a device, which would be waited for."""
        if not problem.value.is_cpu and any(
            isinstance(each, Tensor) for each in (problem.query_positions, problem.key_positions)
        ):
            return None
        return self._flat_positions(problem, problem.grid(torch.device("cpu")))

    def _flat_positions(self, problem: Problem, grid: Grid) -> tuple[Tensor, Tensor]:
        def flat(positions: Tensor) -> Tensor:
            if positions.ndim == 1:
                return positions.long()[None]
            return positions.long().expand(*problem.batch, positions.shape[-1]).reshape(self.batch, -1)

        return flat(grid.query_positions), flat(grid.key_positions)


def select_batches(tensor: Tensor, batch: slice) -> Tensor:
    """A range of batches of a tensor (B or 1, ...); a batch of 1 stands for all of them."""
    return tensor if tensor.shape[0] == 1 else tensor[batch]


SMALLER = (
    "look at a smaller rectangle, such as Weights(slice(0, 256), slice(0, 256)), at Pooled((256, 256)), or at TopK(8)"
)


def check_memory(
    result: str, problem: Problem, sizes: tuple[int, int], *, itemsize: int, extra: int = 0, advice: str = SMALLER
) -> None:
    """Refuse a result of `sizes` per head that takes more memory than the device has.

    Args:
        result: what the message calls the result, with {} for its sizes.
        problem: the call, for its number of heads and its device.
        sizes: rows and columns of the result.
        itemsize: bytes of one number.
        extra: bytes of temporary tensors, in all.
        advice: what the message suggests to ask for.

    Raises:
        ConfigurationError: there is less memory than that.
    """
    leading, (rows, columns) = problem.weights_shape[:-2].numel(), sizes
    needed, available = leading * rows * columns * itemsize + extra, device_memory(problem.value.device)
    if available is not None and needed > available:
        raise ConfigurationError(
            f"{result.format(f'{rows:,} × {columns:,}')} and {leading:,} heads in all needs {needed / 1e9:,.1f} GB, "
            f"and {problem.value.device} has {available / 1e9:,.1f} GB: {advice}"
        )


def device_memory(device: torch.device) -> int | None:
    """The total memory of a device in bytes; None where the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None  # no POSIX system
