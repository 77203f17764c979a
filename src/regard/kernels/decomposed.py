"""The decomposed kernel: each dense part of a sparse mask as a problem of its own, merged by log-sum-exp.

Strided attention over n tokens has n / stride pairs a row, scattered over all tiles; its residue classes are dense
blocks of n / stride rows and columns (Child et al. 2019, arXiv 1904.10509). `Mask.parts` lists such parts; each is
computed by the fastest kernel for it, over rows and columns selected by their positions, so that mask, bias and dropout
are those of the whole problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from ..biases import RelativeBias
from ..core.log_sum_exp import merge_softmax
from ..core.problem import Problem
from ..core.score_forms import at_least_float32
from ..core.symbolic_positions import Positions, PositionSet, ResiduePositions, SelectedPositions
from ..masks.parts import Part
from ..native.flash import FiniteRows
from ..native.library import new_large
from .base import Cost, InPlaceKernel, Kernel, OwnGradient, Result
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .cost_model import RESULT, part_choice_key, predicted_seconds
from .custom_op import apply_kernel, register
from .mask_tiles import memoize

CALLS = 30.0
"""Calls of torch's operators that select the tensors of a part, and merge its result."""


@dataclass(frozen=True, slots=True)
class ResidueClasses:
    """`classes` neighbouring residue classes: class c has the indices first + c + step · i, i in 0..length-1."""

    first: int
    step: int
    classes: int
    length: int

    def part(self, classes: slice) -> ResidueClasses:
        """Some of the classes."""
        return replace(self, first=self.first + classes.start, classes=classes.stop - classes.start)

    def count(self, length: int) -> int:
        """How many indices of `length` these are."""
        return self.classes * self.length

    def select(self, tensor: Tensor) -> Tensor:
        """The classes of a tensor (*leading, n, ·) as a view (classes, *leading, length, ·)."""
        *leading, _, width = tensor.shape
        *strides, row, last = tensor.stride()
        size, stride = (self.classes, *leading, self.length, width), (row, *strides, self.step * row, last)
        return tensor.as_strided(size, stride, tensor.storage_offset() + self.first * row)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Replace the tensor's rows of these classes."""
        self.select(tensor).copy_(rows)

    def add(self, tensor: Tensor, rows: Tensor) -> None:
        """Add to the tensor's rows of these classes."""
        self.select(tensor).add_(rows)


@dataclass(frozen=True, eq=False, slots=True)
class Indices:
    """Some indices in rising order, or all of them: None."""

    indices: Tensor | None = None

    def count(self, length: int) -> int:
        """How many indices of `length` these are."""
        return length if self.indices is None else len(self.indices)

    def select(self, tensor: Tensor) -> Tensor:
        """The tensor's rows at these indices: (*leading, n, ·) to (1, *leading, number, ·)."""
        return (tensor if self.indices is None else tensor.index_select(-2, self.indices)).unsqueeze(0)

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Replace the tensor's rows at these indices."""
        tensor[..., slice(None) if self.indices is None else self.indices, :] = rows[0]

    def add(self, tensor: Tensor, rows: Tensor) -> None:
        """Add to the tensor's rows at these indices."""
        if self.indices is None:
            tensor += rows[0]
        else:
            tensor.index_add_(tensor.ndim - 2, self.indices, rows[0].to(tensor.dtype))


ALL = Indices()
Axis: TypeAlias = ResidueClasses | Indices


@dataclass(frozen=True, eq=False, slots=True)
class Selection:
    """Rows and columns of a problem, and the problem of them.

    part: the part of the mask, where they are one; the first batch axis of its problem is that of the residue classes.
    """

    rows: Axis
    columns: Axis
    problem: Problem
    part: Part | None = None


class PartKernel(Kernel, OwnGradient, Protocol):
    """A kernel of the parts: it predicts its cost, and brings its own gradient."""


class DecomposedKernel:
    """The dense parts of a sparse mask, each by the fastest kernel for it; O(n · √n) for strided and fixed patterns."""

    name = "decomposed"

    def __init__(self, kernels: tuple[PartKernel, ...], without_bias: tuple[PartKernel, ...] = ()) -> None:
        self.kernels, self.without_bias = kernels, without_bias
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Masks without parts, and what is not a function of positions."""
        return reasons_against_parts(problem)

    def cost(self, problem: Problem) -> Cost:
        """The work of all parts, and of merging their results."""
        total = Cost(0.0, 0.0, calls=0.0)
        parts = []
        for selection in selections(problem):
            kernel = self._kernel(selection.problem)
            own, rows = kernel.cost(selection.problem), selection.problem.weights_shape[:-1].numel()
            total = Cost(
                total.flops + own.flops,
                max(total.bytes, own.bytes + 4.0 * rows * problem.value.shape[-1]),
                total.passes + own.passes + RESULT * rows * problem.value.shape[-1],
                moved=total.moved + own.moved,
                calls=total.calls + own.calls + CALLS,
                torch=total.torch + own.torch,
                native=total.native + own.native,
                streamed=total.streamed + own.streamed,
            )
            parts.append(
                f"{selection.part}, {selection.problem.queries:,} × {selection.problem.keys:,}, by {kernel.name}"
            )
        return replace(total, parts=tuple(parts))

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem: those of its parts, merged row by row."""
        problem, (batch, heads, queries, _) = batched.problem, batched.shape
        output = new_large(at_least_float32(batched.value), batch, heads, queries, batched.value.shape[-1])
        lse = output.new_empty(batch, heads, queries, 1)
        found = list(selections(problem))
        first = _count_of_first_part(found, queries)
        if not first:
            output.zero_()
            lse.fill_(float("-inf"))
        into = batched.split_batch(output), batched.split_batch(lse)
        finite = True  # as long as all parts that write or merge find it so; what no part writes is 0
        for at, selection in enumerate(found):
            finite = self._forward_part(selection, *into, accumulate=at >= first) and finite
        result = output.to(batched.value.dtype), lse.squeeze(-1)
        return FiniteRows(result) if finite else result

    def _forward_part(self, selection: Selection, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write a part's result into output and lse (*batch, heads, M, ·), or merge it with what stands there.

        Returns whether all entries of the output that were written are known to be finite.
        """
        kernel, own = self._kernel(selection.problem), BatchedProblem.from_problem(selection.problem)
        if isinstance(kernel, InPlaceKernel) and own.value.dtype == torch.float32:
            output_view, lse_view = _merged_view(selection.rows, output), _merged_view(selection.rows, lse)
            if output_view is not None and lse_view is not None:
                return kernel.forward_into(own, output_view, lse_view.squeeze(-1), accumulate=accumulate)
        part_output, part_lse = kernel.forward(own)
        part_output = own.split_batch(part_output.to(output.dtype))
        part_lse = own.split_batch(part_lse.unsqueeze(-1).to(lse.dtype))
        if accumulate:
            _merge_into(output, lse, part_output, part_lse, selection.rows)
        else:
            selection.rows.write(output, part_output)
            selection.rows.write(lse, part_lse)
        return False

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of each part, added to those of the whole."""
        problem, (*_, queries, keys) = batched.problem, batched.shape
        found = list(selections(problem))
        first = _count_of_first_part(found, queries, keys)
        gradients = batched.new_gradients(zero=not first, bias=saved.needs_bias_grad)
        whole = [batched.split_batch(tensor) for tensor in (gradients.query, gradients.key, gradients.value)]
        above = saved.output, saved.lse.unsqueeze(-1), saved.grad_output, saved.grad_lse.unsqueeze(-1)
        finite = True
        for at, selection in enumerate(found):
            rows, columns = selection.rows, selection.columns
            output, lse, grad_output, grad_lse = (
                rows.select(batched.split_batch(tensor)).flatten(0, -4) for tensor in above
            )
            part = Saved(output, lse.squeeze(-1), grad_output, grad_lse.squeeze(-1), saved.needs_bias_grad)
            kernel, own = self._kernel(selection.problem), BatchedProblem.from_problem(selection.problem)
            query, key, value = (
                _merged_view(axis, tensor) for axis, tensor in zip((rows, columns, columns), whole, strict=True)
            )
            if isinstance(kernel, InPlaceKernel) and query is not None and key is not None and value is not None:
                into = ProblemGradients(query, key, value, bias=gradients.bias)
                finite = kernel.backward_into(own, part, into, accumulate=at >= first) and finite
                continue
            result, finite = kernel.backward(own, part), False
            for axis, target, tensor in zip(
                (rows, columns, columns), whole, (result.query, result.key, result.value), strict=True
            ):
                (axis.add if at >= first else axis.write)(target, own.split_batch(tensor))
            for target, tensor in zip(gradients.bias, result.bias, strict=True):
                target += tensor
            if gradients.weight is not None and result.weight is not None:
                gradients.weight.add_(result.weight)
        return replace(gradients, finite=finite)

    def _kernel(self, problem: Problem) -> PartKernel:
        """The kernel of the lowest predicted time for a part."""

        def compute() -> PartKernel:
            # Whether the gradient of a bias is wanted is not known here: those that have none compute no bias at all.
            kernels = self.kernels if problem.bias is not None else (*self.kernels, *self.without_bias)
            able = [kernel for kernel in kernels if not kernel.why_not(problem)]
            return min(able, key=lambda kernel: predicted_seconds(kernel.cost(problem), problem))

        return memoize(problem, ("kernel of a part", problem.bias_requires_grad(), part_choice_key(problem)), compute)


def reasons_against_parts(problem: Problem) -> list[str]:
    """Why a problem is not computed part by part; empty if it can be."""
    mask = problem.mask
    if mask is None or not mask.parts:
        return ["the mask does not fall into dense parts by residues, columns or rows"]
    reasons = []
    if problem.shift is None or problem.step != 1:
        reasons.append("its parts are selected by consecutive positions")
    if not mask.by_position:
        reasons.append("the mask has a tensor over all pairs, whose rows and columns keep their order")
    if problem.bias is not None and not isinstance(problem.bias, RelativeBias):
        reasons.append("of all biases it adds those by distance alone")
    return reasons


Split: TypeAlias = Callable[[ResidueClasses, ResidueClasses], Sequence[slice]]
"""Slices of the neighbouring residue classes of rows and columns that are computed together."""


def all_classes(rows: ResidueClasses, columns: ResidueClasses) -> Sequence[slice]:
    """All classes together."""
    return [slice(0, rows.classes)]


def selections(problem: Problem, split: Split = all_classes) -> Iterator[Selection]:
    """The problems of all parts of the mask; a part by residues has several where classes differ in length."""
    for part in () if problem.mask is None else problem.mask.parts:
        for rows, columns, *positions in _axes(part, problem, split):
            yield Selection(rows, columns, _part_problem(problem, part, rows, columns, *positions), part)


def _count_of_first_part(found: Sequence[Selection], queries: int, keys: int = 0) -> int:
    """How many selections are of the first part, if they have all queries and keys, each once; otherwise 0.

    They then are written, and those of other parts are added.
    """
    first = [selection for selection in found if selection.part is found[0].part]
    rows, columns = (sum(each.rows.count(queries) for each in first), sum(each.columns.count(keys) for each in first))
    return len(first) if rows == queries and columns >= keys else 0


def _axes(part: Part, problem: Problem, split: Split) -> Iterator[tuple[Axis, Axis, Positions, Positions]]:
    """Rows, columns and the positions of both, of the problems that a part falls into."""
    queries, keys = _position_ranges(problem)
    if part.step > 1:
        for rows, columns in residue_classes(queries, keys, part.step):
            for classes in split(rows, columns):
                own_rows, own_columns = rows.part(classes), columns.part(classes)
                row_positions = _class_positions(queries.start, own_rows, part, problem)
                yield own_rows, own_columns, row_positions, _class_positions(keys.start, own_columns, part, problem)
        return
    selected = [
        (ALL, positions) if chosen is None else _chosen(chosen, positions, problem.value.device)
        for chosen, positions in ((part.rows, queries), (part.columns, keys))
    ]
    (rows, row_positions), (columns, column_positions) = selected
    if all(axis.indices is None or len(axis.indices) for axis in (rows, columns)):
        yield rows, columns, row_positions, column_positions


def _position_ranges(problem: Problem) -> tuple[range, range]:
    """The positions of queries and keys, both consecutive."""
    keys = problem.key_positions if isinstance(problem.key_positions, range) else range(problem.keys)
    queries = problem.query_positions
    return queries if isinstance(queries, range) else range(keys.stop - problem.queries, keys.stop), keys


def residue_classes(queries: range, keys: range, step: int) -> Iterator[tuple[ResidueClasses, ResidueClasses]]:
    """Rows and columns of all positions of one residue mod `step`; classes of equal lengths together.

    >>> for rows, columns in residue_classes(range(1, 4), range(4), 2):
    ...     print(rows, columns)
    ResidueClasses(first=0, step=2, classes=1, length=2) ResidueClasses(first=1, step=2, classes=1, length=2)
    ResidueClasses(first=1, step=2, classes=1, length=1) ResidueClasses(first=0, step=2, classes=1, length=2)
    """
    offset = queries.start - keys.start
    found: list[tuple[int, int, int, int]] = []  # row, column, and how many there are of both, of each class
    for row in range(min(step, len(queries))):
        column = (row + offset) % step
        found.append((row, column, -(-(len(queries) - row) // step), max(-(-(len(keys) - column) // step), 0)))
    start = 0
    for at in range(1, len(found) + 1):
        if at < len(found) and found[at][1] == found[at - 1][1] + 1 and found[at][2:] == found[at - 1][2:]:
            continue
        row, column, height, width = found[start]
        if width:
            yield ResidueClasses(row, step, at - start, height), ResidueClasses(column, step, at - start, width)
        start = at


def _class_positions(start: int, axis: ResidueClasses, part: Part, problem: Problem) -> Positions:
    """The positions of classes; those of the first class for all where mask and bias depend on distances alone."""
    first = start + axis.first
    bias_by_distance = problem.bias is None or isinstance(problem.bias, RelativeBias)
    if (part.mask is None or part.mask.by_distance) and bias_by_distance and problem.dropout is None:
        return range(first, first + axis.length * part.step, part.step)
    return ResiduePositions(first, part.step, axis.length, axis.classes, leading=len(problem.batch))


def _chosen(chosen: PositionSet, positions: range, device: torch.device) -> tuple[Indices, SelectedPositions]:
    selected = SelectedPositions(chosen, positions)
    return Indices(selected.indices(device)), selected


def _part_problem(problem: Problem, part: Part, rows: Axis, columns: Axis, *positions: Positions) -> Problem:
    """The problem of selected rows and columns, (classes, *batch, heads, ·, ·), whose sinks are left out."""

    def select(axis: Axis, tensor: Tensor) -> Tensor:
        return axis.select(tensor if problem.heads else tensor.unsqueeze(-3))

    dropout = problem.dropout
    if dropout is not None:
        dropout = replace(dropout, head_count=problem.weights_shape[:-2].numel())
    return replace(
        problem,
        pairs=replace(problem.pairs, query=select(rows, problem.pairs.query), key=select(columns, problem.pairs.key)),
        value=select(columns, problem.value),
        mask=part.mask,
        sinks=None,
        dropout=dropout,
        query_positions=positions[0],
        key_positions=positions[1],
        wants_lse=True,
    )


def _merge_into(output: Tensor, lse: Tensor, part_output: Tensor, part_lse: Tensor, rows: Axis) -> None:
    """Merge a part's result into the rows that it has."""
    outputs, lses = torch.stack([rows.select(output), part_output]), torch.stack([rows.select(lse), part_lse])
    merged_output, merged_lse = merge_softmax(outputs, lses.squeeze(-1), dim=0)
    rows.write(output, merged_output)
    rows.write(lse, merged_lse.unsqueeze(-1))


def _merged_view(axis: Axis, tensor: Tensor) -> Tensor | None:
    """The selected rows of a tensor (*batch, heads, n, ·) as a view (classes · B, heads, ·, ·); None if it is none."""
    if not isinstance(axis, ResidueClasses) and axis is not ALL:
        return None
    selected = axis.select(tensor)
    try:
        return selected.view(-1, *selected.shape[-3:])
    except RuntimeError:  # batches and classes have no common stride
        return None
