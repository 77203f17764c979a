"""Rows and columns that a sparse mask's dense parts select, and the problem of each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..biases import RelativeBias
from ..core.problem import Problem
from ..core.symbolic_positions import Positions, PositionSet, ResiduePositions, SelectedPositions
from ..masks.parts import Part


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
    """Some indices in rising order, or all of them: None. on_host: the same on the CPU, where nothing is waited for."""

    indices: Tensor | None = None
    on_host: Tensor | None = None

    @classmethod
    def of(cls, on_host: Tensor, device: torch.device) -> Indices:
        """Indices that are known on the CPU, for tensors on a device."""
        return cls(on_host.to(device, non_blocking=True), on_host)

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
    return Indices.of(selected.indices(torch.device("cpu")), device), selected


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
