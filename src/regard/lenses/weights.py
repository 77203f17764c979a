"""The weights themselves, or a rectangle of them.

Large arrays on the CPU whose memory the system gives as they are written to.
"""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..core.grid import WHOLE
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import transformed, without_autocast
from ..errors import ConfigurationError
from ..utils.pytree import tensors_of
from .base import Frame, Reduction, Tile, check_memory


def zeros_as_written(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to, and then page by page.

    torch would write each zero, and so take all of the memory, which takes longer than what is put into it. Pages are
    the system's small ones: huge ones are faster where there are some free, but are taken whole, and where the system
    has to move others out of the way for them they take several times as long.

    >>> zeros_as_written((2, 3), torch.float32)
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    count = math.prod(sizes)
    if not count:
        return torch.zeros(tuple(sizes), dtype=dtype, device="cpu")
    private: dict[str, Any] = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # else no POSIX system, where it is private as it is
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, count * dtype.itemsize, **private)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))


BLOCK = 2**21
"""The most weights that are made at a time, where there is no gradient."""


@dataclass(frozen=True)
class Weights:
    """exp(scores - lse) on rows × columns: softmax weights, (..., heads, rows, columns), before any dropout.

    Each row is normed over all its keys, also where only some columns are shown; a row with nothing to attend to
    shows zeros, one that attends to NaN shows NaN. Only what is shown is computed, and what is computed beside it is of
    constant size, unless a gradient is asked for: it flows through the weights, with every step in memory.

    Raises:
        ConfigurationError: rows or columns that are no slice of whole numbers with a step of at least 1; when used,
            rows or columns that are not there, or a rectangle that takes more memory than the device has.

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
            object.__setattr__(self, name, _read(name, choice))

    def start(self, problem: Problem) -> _Rectangle | _Map:
        """Begin to look: nothing is computed, but what does not fit is said."""
        self.check(problem)
        whole = range(problem.queries)[self.rows], range(problem.keys)[self.columns]
        if whole != (range(problem.queries), range(problem.keys)) or not _goes_by_tiles(problem):
            return _Rectangle(self)
        return _Map(problem)

    def check(self, problem: Problem) -> None:
        """Say so where the problem has no such rows or columns, or the device no room.

        Raises:
            ConfigurationError: it does not.
        """
        sizes = [
            _chosen(name, choice, length)
            for name, choice, length in zip(
                ("rows", "columns"), (self.rows, self.columns), problem.weights_shape[-2:], strict=True
            )
        ]
        check_memory("Weights of {} pairs", problem, (sizes[0], sizes[1]), each=Frame.of(problem).itemsize)

    def look(self, problem: Problem, lse: Tensor) -> Tensor:
        """The weights of the rectangle, of a problem without NaN."""
        with without_autocast(problem.value.device.type):
            if transformed() or _differentiable(problem, lse):
                return self._whole(problem, lse)
            return self._by_rows(problem, lse)

    def _whole(self, problem: Problem, lse: Tensor) -> Tensor:
        """At once, with a gradient."""
        lse = lse[..., self.rows, None]
        scores = problem.scores(self.rows, self.columns)
        return (scores - _no_weight(lse)).exp_()

    def _by_rows(self, problem: Problem, lse: Tensor) -> Tensor:
        """Some rows at a time."""
        rows = range(problem.queries)[self.rows]
        columns = len(range(problem.keys)[self.columns])
        shown = lse.new_empty(*problem.weights_shape[:-2], len(rows), columns)
        most = max(BLOCK // max(problem.weights_shape[:-2].numel() * columns, 1), 1)
        for start in range(0, len(rows), most):
            block = _slice(rows[start : start + most])
            part, into = lse[..., block], shown[..., start : start + most, :]
            if _suits_native(problem):
                _write_natively(problem, part, block, self.columns, into)
                continue
            scores = problem.scores(block, self.columns).sub_(_no_weight(part[..., None]))
            torch.exp(scores, out=into)
        return shown

    def __hash__(self) -> int:
        # Slices have no hash before Python 3.12.
        return hash((repr(self.rows), repr(self.columns)))


def _no_weight(lse: Tensor) -> Tensor:
    """+inf for rows that attend to nothing, also where the problem has finite scores since what was infinite is 0."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _suits_native(problem: Problem) -> bool:
    pairs = problem.pairs
    return isinstance(pairs, DotPairs) and problem.bias is None and native.reads(pairs.query, pairs.key)


def _write_natively(problem: Problem, lse: Tensor, rows: slice, columns: slice, into: Tensor) -> None:
    """Some rows in one pass, without their scores in memory."""
    batch, pairs = problem.batch, problem.pairs
    keep = problem.keep(problem.grid().tile(rows, columns))

    def four(tensor: Tensor) -> Tensor:
        """The leading axes as batch and heads, where it has any, before the last two."""
        tensor = tensor if problem.heads or tensor.ndim <= 2 else tensor.unsqueeze(-3)
        if tensor.ndim <= 3:
            return tensor[(None,) * (4 - tensor.ndim)]
        return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:])

    def whole(tensor: Tensor) -> Tensor:
        tensor = four(tensor)
        return tensor.expand(batch.numel(), *tensor.shape[1:])

    leading = batch.numel(), problem.weights_shape[-3] if problem.heads else 1
    native.write_weights(
        whole(pairs.query[..., rows, :]),
        whole(pairs.key[..., columns, :]),
        pairs.scale,  # type: ignore[union-attr]  # `_suits_native` lets dot products alone through
        _no_weight(lse).reshape(*leading, lse.shape[-1]),
        into.view(*leading, *into.shape[-2:]),
        keep=None if keep is None else four(keep),
        softcap=problem.softcap,
    )


class _Rectangle:
    """Weights that are read from the problem."""

    reductions = ()

    def __init__(self, lens: Weights) -> None:
        self.lens = lens

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return self.lens.look(problem, lse)


class _Map:
    """All weights, put together of the tiles that the mask leaves; what lies between them is never touched."""

    terms = False

    def __init__(self, problem: Problem) -> None:
        self.frame = Frame.of(problem)
        sizes = self.frame.batch, self.frame.heads, problem.queries, problem.keys
        self.into = zeros_as_written(sizes, self.frame.dtype)

    @property
    def reductions(self) -> Sequence[Reduction]:
        return (self,)

    def add(self, tile: Tile) -> None:
        self.into[tile.batch, :, tile.rows, tile.columns] = tile.weights

    def native(self) -> native.AllWeights | None:
        return native.AllWeights(self.into) if self.into.dtype == torch.float32 else None

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.frame.broken(lse)
        if broken.any():
            self.into[broken] = float("nan")
        return self.frame.shown(self.into)


def _read(name: str, choice: slice) -> slice:
    """The slice with plain numbers, so that those that are equal have the same hash."""
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
            f"Weights needs {name} as a slice with a step of at least 1, such as slice(0, 5); it is {choice!r}: turn "
            "what is shown round, as with .flip(-2) for rows"
        )
    return slice(start, stop, step)


def _chosen(name: str, choice: slice, length: int) -> int:
    """How many of the rows or columns a slice chooses; its ends are within -length and length."""
    if any(end is not None and not -length <= end <= length for end in (choice.start, choice.stop)):
        start = "up" if choice.start is None else choice.start
        stop = "the end" if choice.stop is None else choice.stop
        raise ConfigurationError(
            f"Weights was asked for {name} {start} to {stop}, and there are {length:,}: the ends of the slice need to "
            f"lie in {-length:,} to {length:,}"
        )
    return len(range(length)[choice])


def _goes_by_tiles(problem: Problem) -> bool:
    return problem.value.is_cpu and not transformed() and not _differentiable(problem)


def _differentiable(problem: Problem, lse: Tensor | None = None) -> bool:
    read = [*tensors_of(problem), *([] if lse is None else [lse])]
    # A bias of the caller's own may hold its parameters where `tensors_of` does not look.
    asked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in read)
    return asked or problem.bias_needs_gradient()


def _slice(rows: range) -> slice:
    """The slice that chooses these rows."""
    return slice(rows.start, rows.stop, rows.step)
