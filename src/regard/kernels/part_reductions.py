"""Reductions of the weights of a part of the rows and columns, added to the reductions of all weights.

Parts are the dense ones of a sparse mask, computed at the price of the parts, and the blocks of a ring, whose keys a
process receives one after another. The weights of a part are those of its rows and columns, with the log-sum-exps of
the whole rows. Each part has reductions of its own size, by native code, which are then added to those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ..backends.base import WeightPass
from ..backends.registry import BACKENDS
from ..core.batched_problem import BatchedProblem
from ..core.problem import Problem
from ..lenses import NativeReduction, Reduction, WeightTile
from ..lenses.forms import (
    CellReduction,
    ColumnSums,
    DistanceSums,
    LargestWeights,
    RowSums,
    TermPositions,
    WeightForm,
    WeightMatrix,
)
from ..tiles.mask_tiles import count_visited_pairs
from ..tiles.selections import Axis, Indices, ResidueClasses, Selection, reasons_against_parts, selections

SELECTION = 2.0**19
"""What selecting the tensors of a part takes, in pairs of native code."""
CELLS_AT_ONCE = 2**22
"""Cells of a pooled map, over batches, heads and residue classes, that are in memory at once."""


def prefers_parts(problem: Problem) -> bool:
    """Whether native code computes the parts of the mask, and they have fewer pairs in their tiles than the mask."""
    if reasons_against_parts(problem):
        return False
    pairs, heads = 0.0, problem.weights_shape[-3] if problem.heads else 1
    for selection in selections(problem):
        if pass_over(selection.problem) is None:
            return False
        pairs += count_visited_pairs(selection.problem) * heads + SELECTION
    return pairs < count_visited_pairs(problem) * heads


def pass_over(problem: Problem) -> WeightPass | None:
    """Who adds up the weights of a problem without storing them; None where nobody does."""
    able = (each.weights for each in BACKENDS if each.runs(problem.value))
    return next((weights for weights in able if weights is not None and weights.reduces(problem)), None)


def reduce_parts(problem: Problem, lse: Tensor, reductions: Sequence[WeightForm]) -> None:
    """`reduce_weights` for a problem whose mask has parts; lse (B, H, M)."""
    for reduction in reductions:
        if isinstance(reduction, LargestWeights):
            reduction.weights.zero_()
            reduction.columns.zero_()

    def split(rows: ResidueClasses, columns: ResidueClasses) -> list[slice]:
        return _classes_of_equal_cells(rows, columns, [of for of in reductions if isinstance(of, CellReduction)])

    for selection in selections(problem, split):
        _reduce_selection(selection, lse, reductions)


def _reduce_selection(selection: Selection, lse: Tensor, reductions: Sequence[WeightForm]) -> None:
    """The reductions of some rows and columns, added to those of the whole."""
    batched = BatchedProblem.from_problem(selection.problem)
    lse = selection.rows.select(lse.unsqueeze(-1)).squeeze(-1).flatten(0, 1)  # (classes · B, H, m)
    own = [_restricted(reduction, selection, batched.shape) for reduction in reductions]
    weights = pass_over(selection.problem)
    if weights is None:
        raise AssertionError("parts are reduced where a backend goes over each of them")
    weights.reduce(batched, lse, own)
    for reduction, found in zip(reductions, own, strict=True):
        _add(reduction, found, selection)


class BlockReduction:
    """A reduction over a block of the weights, which adds to that over all of them.

    problem: that of the block. rows and columns: its indices in the whole, which may have a step. After the pass over
    the block `add_to_whole` adds what native code has computed; tiles are passed on at once.
    """

    def __init__(self, reduction: Reduction, problem: Problem, rows: slice, columns: slice) -> None:
        self.reduction, self.problem, self.rows, self.columns = reduction, problem, rows, columns
        self._computed: tuple[WeightForm, WeightForm, Selection] | None = None

    @property
    def needs_entropy_terms(self) -> bool:
        return self.reduction.needs_entropy_terms

    def add(self, tile: WeightTile) -> None:
        rows, columns = _indices_of(self.rows, tile.rows), _indices_of(self.columns, tile.columns)
        self.reduction.add(WeightTile(tile.weights, tile.entropy_terms, tile.batch, rows, columns))

    def native(self) -> WeightForm | None:
        """The form of the whole, restricted to the block; None where it has none."""
        whole = self.reduction.native() if isinstance(self.reduction, NativeReduction) else None
        if whole is None:
            return None
        device = self.problem.value.device
        rows, columns = (
            Indices.of(torch.arange(of.start, of.stop, of.step or 1, device="cpu"), device)
            for of in (self.rows, self.columns)
        )
        selection = Selection(rows, columns, self.problem)
        own = _restricted(whole, selection, BatchedProblem.from_problem(self.problem).shape)
        self._computed = whole, own, selection
        return own

    def add_to_whole(self) -> None:
        """Add the native reduction of the block to that of the whole."""
        if self._computed is not None:
            _add(*self._computed)


def _indices_of(whole: slice, part: slice) -> slice:
    """The indices of a part of a slice, both with start and stop."""
    chosen = range(whole.start, whole.stop, whole.step or 1)[part]
    return slice(chosen.start, chosen.stop, chosen.step)


def _restricted(reduction: WeightForm, selection: Selection, sizes: tuple[int, int, int, int]) -> WeightForm:
    """The reduction over the rows and columns of a selection, of `sizes` (classes · B, H, m, n), from zero."""
    batch, heads, queries, keys = sizes

    def zeros(*shape: int, like: Tensor) -> Tensor:
        return like.new_zeros(batch, heads, *shape)

    positions = None if isinstance(reduction, LargestWeights | WeightMatrix) else reduction.positions
    if positions is not None:
        positions = TermPositions(*_first_class(selection, positions.queries, positions.keys))
    match reduction:
        case RowSums():
            return replace(reduction, into=zeros(queries, like=reduction.into), positions=positions)
        case ColumnSums():
            return replace(reduction, into=zeros(keys, like=reduction.into), positions=positions)
        case CellReduction():
            rows, columns = _first_class(selection, reduction.rows, reduction.columns)
            into = zeros(*reduction.into.shape[2:], like=reduction.into)
            return replace(reduction, rows=rows, columns=columns, into=into, positions=positions)
        case LargestWeights():
            shape = queries, reduction.weights.shape[-1]
            return LargestWeights(zeros(*shape, like=reduction.weights), zeros(*shape, like=reduction.columns))
        case DistanceSums():
            rows, columns = _first_class(selection, reduction.queries, reduction.keys)
            mass, moments = zeros(queries, like=reduction.mass), zeros(queries, like=reduction.moments)
            histogram = zeros(reduction.histogram.shape[-1], like=reduction.histogram)
            return DistanceSums(rows, columns, reduction.edges, mass, moments, histogram)
        case WeightMatrix():
            return WeightMatrix(zeros(queries, keys, like=reduction.into))


def _add(whole: WeightForm, found: WeightForm, selection: Selection) -> None:
    """Add the reduction of a selection, or merge it where it is a maximum."""
    rows, columns = selection.rows, selection.columns

    def by_class(tensor: Tensor, whole: Tensor) -> Tensor:
        return tensor.unflatten(0, (-1, len(whole)))  # (classes, B, H, ...)

    match whole, found:
        case (RowSums(), RowSums()):
            rows.add(whole.into.unsqueeze(-1), by_class(found.into, whole.into).unsqueeze(-1))
        case (ColumnSums(), ColumnSums()):
            columns.add(whole.into.unsqueeze(-1), by_class(found.into, whole.into).unsqueeze(-1))
        case (CellReduction(), CellReduction()):
            cells = by_class(found.into, whole.into)
            if whole.is_sum:
                whole.into.add_(cells.sum(0))
            else:
                torch.maximum(whole.into, cells.amax(0), out=whole.into)
        case (LargestWeights(), LargestWeights()):
            _merge_largest(whole, found, selection)
        case (DistanceSums(), DistanceSums()):
            for into, sums in ((whole.mass, found.mass), (whole.moments, found.moments)):
                rows.add(into.unsqueeze(-1), by_class(sums, into).unsqueeze(-1))
            whole.histogram.add_(by_class(found.histogram, whole.histogram).sum(0))
        case (WeightMatrix(), WeightMatrix()):
            pairs = [
                _indices(axis, length).to(whole.into.device, non_blocking=True)
                for axis, length in zip((rows, columns), whole.into.shape[2:], strict=True)
            ]
            for at, weights in enumerate(by_class(found.into, whole.into)):
                whole.into[..., pairs[0][at, :, None], pairs[1][at]] += weights


def _merge_largest(whole: LargestWeights, found: LargestWeights, selection: Selection) -> None:
    """The k largest of those so far and those of a selection, whose columns are counted within it."""
    rows, batch, k = selection.rows, len(whole.weights), whole.weights.shape[-1]
    weights, columns = (tensor.unflatten(0, (-1, batch)) for tensor in (found.weights, found.columns))
    indices = _indices(selection.columns, selection.problem.keys).to(columns.device, non_blocking=True)  # (classes, n)
    columns = columns.where(weights > 0, 0)
    columns = torch.stack([own[of] for own, of in zip(indices, columns, strict=True)])
    all_weights = torch.cat([rows.select(whole.weights), weights], -1)
    all_columns = torch.cat([rows.select(whole.columns), columns], -1)
    largest = all_weights.topk(k, -1)
    rows.write(whole.weights, largest.values)
    rows.write(whole.columns, all_columns.gather(-1, largest.indices))


def _first_class(selection: Selection, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Values of rows (M,) and columns (N,) in the first residue class, or at the selected indices.

    All classes have those of the first one: cells by how they were split, and distances of positions always.
    """
    axes = (selection.rows, rows), (selection.columns, columns)
    first, other = (
        values[_indices(axis, len(values))[0].to(values.device, non_blocking=True)].contiguous()
        for axis, values in axes
    )
    return first, other


def _indices(axis: Axis, length: int) -> Tensor:
    """The indices of each residue class, (classes, ·), or the selected ones of `length`, (1, ·), on the CPU."""
    if isinstance(axis, ResidueClasses):
        return (
            axis.first
            + torch.arange(axis.classes, device="cpu")[:, None]
            + axis.step * torch.arange(axis.length, device="cpu")
        )
    return torch.arange(length, device="cpu")[None] if axis.on_host is None else axis.on_host[None]


def _classes_of_equal_cells(
    rows: ResidueClasses, columns: ResidueClasses, reductions: Sequence[CellReduction]
) -> list[slice]:
    """Neighbouring classes whose rows and columns fall into the same cells, for all cell reductions."""
    if not reductions:
        return [slice(0, rows.classes)]
    cuts, most = {0, rows.classes}, rows.classes
    for reduction in reductions:
        for axis, cells in ((rows, reduction.rows), (columns, reduction.columns)):
            own = cells[_indices(axis, len(cells))]  # (classes, ·)
            cuts |= set(((own[1:] != own[:-1]).any(-1).nonzero().flatten() + 1).tolist())
        most = min(most, max(CELLS_AT_ONCE // reduction.into.numel(), 1))
    found = []
    for start, stop in pairwise(sorted(cuts)):
        found += [slice(at, min(at + most, stop)) for at in range(start, stop, most)]
    return found
