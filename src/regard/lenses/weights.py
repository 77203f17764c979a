"""The softmax weights, all or a rectangle of them."""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.grid import WHOLE
from ..core.log_sum_exp import in_float64, with_exact_lse
from ..core.problem import Problem
from ..core.score_forms import with_rows
from ..core.torch_modes import under_forward_mode, under_transform, without_autocast
from ..errors import ConfigurationError
from ..utils.pytree import tree_tensors
from .base import Reduction, RowShard, WeightsLayout, WeightTile, check_memory
from .forms import WeightMatrix


def lazy_zeros(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in an anonymous memory map: pages are committed when they are first written to.

    torch.zeros would write every zero, and so commit all of the memory, which takes longer than filling in the
    weights. The map has small pages: huge pages are faster where some are free, but are committed whole, and several
    times slower where the system has to compact memory for them.

    >>> lazy_zeros((2, 3), torch.float32)
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    count = math.prod(sizes)
    if not count:
        return torch.zeros(tuple(sizes), dtype=dtype, device="cpu")
    private: dict[str, Any] = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # other systems have no flags: there it is private already
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, count * dtype.itemsize, **private)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))


MAX_WEIGHTS_AT_ONCE = 2**21
"""The most weights computed at a time, without a gradient."""


@dataclass(frozen=True)
class Weights:
    """exp(scores - lse) on rows × columns: softmax weights, (..., heads, rows, columns), before any dropout.

    With a normalizer, they are its weights. Each row is normalised over all its keys, also where only some columns are
    selected; a row with nothing to attend to is zeros, one that attends to NaN is NaN. Only the selected weights are
    computed, with temporary tensors of constant size; for normalizers without log-sum-exp, whole rows, a few at a time.
    With a gradient, autograd stores every intermediate.

    Raises:
        ConfigurationError: rows or columns that are no slice of whole numbers with a step of at least 1; when it
            starts, rows or columns that are not there, or a rectangle that takes more memory than the device has.

    >>> import torch, regard
    >>> corner = regard.lenses.Weights(slice(0, 2), slice(0, 3))
    >>> regard.observe(torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4, 8), corner)[corner]
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.2500, 0.2500]])
    """

    rows: slice = field(default_factory=lambda: WHOLE)
    columns: slice = field(default_factory=lambda: WHOLE)

    def __post_init__(self) -> None:
        for name, choice in (("rows", self.rows), ("columns", self.columns)):
            object.__setattr__(self, name, _checked_slice(name, choice))

    def start(self, problem: Problem) -> _RectangleState | _MatrixState:
        """The state of one run; a rectangle that does not fit the problem raises here."""
        self.check(problem)
        whole = range(problem.queries)[self.rows], range(problem.keys)[self.columns]
        if whole != (range(problem.queries), range(problem.keys)) or not _computed_by_tiles(problem):
            return _RectangleState(self)
        return _MatrixState(problem)

    def start_shard(self, problem: Problem, shard: RowShard) -> _OwnRowsState | _ChosenRowsState:
        """The state of one run over the rows of one process: its rows of all weights, or all of some chosen rows."""
        layout = WeightsLayout.from_problem(problem, shard)
        columns = range(layout.keys)[self.columns]
        if self.rows == WHOLE:
            self.check(problem)
            return _OwnRowsState(layout, columns)
        self._check(problem, (layout.all_queries, layout.keys))
        return _ChosenRowsState(layout, shard, range(layout.all_queries)[self.rows], columns)

    def check(self, problem: Problem) -> None:
        """Refuse rows or columns that the problem does not have, and a rectangle larger than the memory.

        Raises:
            ConfigurationError: the rectangle does not fit.
        """
        self._check(problem, (problem.queries, problem.keys))

    def _check(self, problem: Problem, lengths: tuple[int, int]) -> None:
        sizes = [
            _selected(name, choice, length)
            for name, choice, length in zip(("rows", "columns"), (self.rows, self.columns), lengths, strict=True)
        ]
        check_memory(
            "Weights of {} pairs",
            problem,
            (sizes[0], sizes[1]),
            itemsize=WeightsLayout.from_problem(problem).result_itemsize,
        )

    def compute(self, problem: Problem, lse: Tensor) -> Tensor:
        """The weights of the rectangle, of a problem whose tensors have no NaN."""
        with without_autocast(problem.value.device.type):
            if under_transform():
                return self._at_once(problem, lse)
            dtype = lse.dtype
            problem, lse = with_exact_lse(problem, lse, self.rows)
            compute = self._at_once if _differentiable(problem, lse) else self._by_rows
            return compute(problem, lse).to(dtype)

    def _at_once(self, problem: Problem, lse: Tensor) -> Tensor:
        """All rows in one step, with a gradient."""
        if not problem.has_lse:
            return whole_row_weights(problem, lse, self.rows)[..., self.columns]
        lse = lse[..., self.rows, None]
        scores = problem.log_numerator(problem.scores(self.rows, self.columns))
        return (scores - infinite_where_empty(lse)).exp_()

    def _by_rows(self, problem: Problem, lse: Tensor) -> Tensor:
        """Blocks of rows, without a gradient."""
        rows = range(problem.queries)[self.rows]
        columns = len(range(problem.keys)[self.columns])
        result = lse.new_empty(*problem.weights_shape[:-2], len(rows), columns)
        computed = columns if problem.has_lse else problem.keys
        most = max(MAX_WEIGHTS_AT_ONCE // max(problem.weights_shape[:-2].numel() * computed, 1), 1)
        for start in range(0, len(rows), most):
            block = _slice(rows[start : start + most])
            part, into = lse[..., block], result[..., start : start + most, :]
            if any(write(problem, part, block, self.columns, into) for write in _writers):
                continue
            if not problem.has_lse:
                into.copy_(whole_row_weights(problem, lse, block)[..., self.columns])
                continue
            logs = problem.log_numerator(problem.scores(block, self.columns))
            torch.exp(logs.sub_(infinite_where_empty(part[..., None])), out=into)
        return result

    def __hash__(self) -> int:
        # Slices have no hash before Python 3.12.
        return hash((repr(self.rows), repr(self.columns)))


Writer: TypeAlias = Callable[[Problem, Tensor, slice, slice, Tensor], bool]
"""Writes the weights of some rows and columns, by the rows' log-sum-exp, into a tensor; False if it cannot."""

_writers: list[Writer] = []


def register_writer(writer: Writer) -> None:
    """Have a backend write weights without a tensor of their scores."""
    _writers.append(writer)


def infinite_where_empty(lse: Tensor) -> Tensor:
    """The log-sum-exp with +inf for rows that attend to nothing, so that exp(score - lse) is 0 for any finite score."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def whole_row_weights(problem: Problem, lse: Tensor, rows: slice) -> Tensor:
    """The weights of some rows over all keys, (..., heads, m, N), where they follow from all scores of a row."""
    return problem.normalized(rows)[0].masked_fill(lse[..., rows, None].isnan(), math.nan)


class _RectangleState:
    """Computes the weights of a rectangle in `finish`."""

    reductions = ()

    def __init__(self, lens: Weights) -> None:
        self.lens = lens

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return self.lens.compute(problem, lse)


class _MatrixState:
    """All weights, assembled from the tiles that the mask does not empty; memory between them is never written."""

    needs_entropy_terms = False

    def __init__(self, problem: Problem) -> None:
        self.layout = WeightsLayout.from_problem(problem)
        sizes = self.layout.batch, self.layout.heads, problem.queries, problem.keys
        self.into = lazy_zeros(sizes, self.layout.dtype)

    @property
    def reductions(self) -> Sequence[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        self.into[tile.batch, :, tile.rows, tile.columns] = tile.weights

    def native(self) -> WeightMatrix | None:
        return WeightMatrix(self.into) if self.into.dtype == torch.float32 else None

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.layout.nan_rows(lse)
        if broken.any():
            self.into[broken] = float("nan")
        return self.layout.to_result(self.into)


class _OwnRowsState:
    """The weights of the rows of one process, assembled from the tiles of all keys; `columns` are the chosen ones."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout, columns: range) -> None:
        self.layout, self.columns = layout, columns
        sizes = layout.batch, layout.heads, layout.queries, len(columns)
        if layout.device.type == "cpu":
            self.into = lazy_zeros(sizes, layout.dtype)
        else:
            self.into = torch.zeros(sizes, dtype=layout.dtype, device=layout.device)

    @property
    def reductions(self) -> Sequence[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        span = range(tile.columns.start, tile.columns.stop, tile.columns.step or 1)
        own, chosen = _common(span, self.columns)
        self.into[tile.batch, :, tile.rows, chosen] = tile.weights[..., own].to(self.into.dtype)

    def native(self) -> WeightMatrix | None:
        """Supported for all columns."""
        whole = self.columns == range(self.layout.keys)
        return WeightMatrix(self.into) if whole and self.into.dtype == torch.float32 else None

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.layout.nan_rows(lse)
        if self.into.is_cpu:
            self.into[broken] = float("nan")
        else:
            self.into.masked_fill_(broken.unsqueeze(-1), float("nan"))
        return self.layout.to_result(self.into)


class _ChosenRowsState:
    """The weights of chosen rows of all processes, computed in each of them from the gathered rows and keys."""

    reductions = ()

    def __init__(self, layout: WeightsLayout, shard: RowShard, rows: range, columns: range) -> None:
        self.layout, self.shard, self.rows, self.columns = layout, shard, rows, columns

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        problem, shard = in_float64(problem) if lse.dtype == torch.float64 else problem, self.shard
        query, key = (
            shard.gather_rows(problem.pairs.query, self.rows),
            shard.gather_keys(problem.pairs.key, self.columns),
        )
        lse = shard.gather_rows(lse.unsqueeze(-1), self.rows).squeeze(-1)
        positions = shard.positions[self.rows.start : self.rows.stop : self.rows.step], self.columns
        rows, columns = (torch.arange(of.start, of.stop, of.step, device=key.device) for of in positions)
        chosen = replace(
            problem,
            pairs=with_rows(problem.pairs, query, key, *positions),
            value=problem.value.new_empty(*problem.value.shape[:-2], len(columns), 0),
            query_positions=rows,
            key_positions=columns,
        )
        return Weights().compute(shard.finite(chosen), lse).to(self.layout.dtype)


def _checked_slice(name: str, choice: slice) -> slice:
    """The slice with plain ints, so that equal lenses have equal hashes."""
    if not isinstance(choice, slice):
        raise ConfigurationError(f"Weights needs {name} as a slice, such as slice(0, 5); it is {choice!r}")
    try:
        start, stop, step = (
            None if end is None else int(operator.index(end)) for end in (choice.start, choice.stop, choice.step)
        )
    except TypeError:
        raise ConfigurationError(
            f"Weights needs {name} as a slice of whole numbers, such as slice(0, 5); it is {choice!r}"
        ) from None
    if step is not None and step < 1:
        raise ConfigurationError(
            f"Weights needs {name} as a slice with a step of at least 1, such as slice(0, 5); it is {choice!r}: flip "
            "the result instead, as with .flip(-2) for rows"
        )
    return slice(start, stop, step)


def _common(first: range, second: range) -> tuple[slice, slice]:
    """Where the numbers that two rising ranges have in common are, in each of them.

    >>> _common(range(4, 16), range(1, 30, 3)), _common(range(0, 10, 4), range(1, 10, 2))
    ((slice(0, 10, 3), slice(1, 5, 1)), (slice(0, 0, 1), slice(0, 0, 1)))
    """
    step = math.lcm(first.step, second.step)
    start = max(first.start, second.start)
    common = next((at for at in range(start, start + step) if at in first and at in second), None)
    if common is None:
        return slice(0, 0, 1), slice(0, 0, 1)
    last = min(first[-1], second[-1])
    count = (last - common) // step + 1

    def places(of: range) -> slice:
        begin, stride = of.index(common), step // of.step
        return slice(begin, begin + (count - 1) * stride + 1, stride)

    return places(first), places(second)


def _selected(name: str, choice: slice, length: int) -> int:
    """The number of rows or columns that a slice selects; its ends need to be within -length and length."""
    if any(end is not None and not -length <= end <= length for end in (choice.start, choice.stop)):
        start = "up" if choice.start is None else choice.start
        stop = "the end" if choice.stop is None else choice.stop
        raise ConfigurationError(
            f"Weights was asked for {name} {start} to {stop}, and there are {length:,}: the ends of the slice need to "
            f"lie in {-length:,} to {length:,}"
        )
    return len(range(length)[choice])


def _computed_by_tiles(problem: Problem) -> bool:
    return problem.value.is_cpu and not under_transform() and not _differentiable(problem)


def _differentiable(problem: Problem, lse: Tensor | None = None) -> bool:
    read = [*tree_tensors(problem), *([] if lse is None else [lse])]
    # A user-defined bias may have parameters that `tree_tensors` does not find.
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
    return wanted or problem.bias_requires_grad() or under_forward_mode()


def _slice(rows: range) -> slice:
    """The slice that selects these rows."""
    return slice(rows.start, rows.stop, rows.step)
