"""The forms that one launch of the lens pass fills, as its arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...lenses.forms import (
    CellReduction,
    ColumnSums,
    DistanceSums,
    LargestWeights,
    RowSums,
    TermPositions,
    WeightForm,
    WeightMatrix,
)
from .kernel_arguments import StridedRows
from .lens_arguments import (
    CellsArgument,
    HistogramArgument,
    LargestArgument,
    MatrixArgument,
    PositionsArgument,
    TermSums,
    WantedSums,
)

FEW, MOST_BESIDE = 8, 16
"""The most of the largest weights of a row for which a large tile has registers, and that are found beside other
results."""
FARTHEST = 2**30
"""Positions count as no farther from the first key than this: their differences are int32, and none is read back."""
LAST = 2**31 - 1


class LensRequests:
    """Row and column sums of each term, one map of cells, and one form of each other kind.

    Sums that several forms ask for are computed once and then added to each.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[Tensor]] = {}
        self._totals: dict[tuple[str, str], Tensor] = {}
        self._cells: CellReduction | None = None
        self._distances: DistanceSums | None = None
        self._largest: LargestWeights | None = None
        self._matrix: WeightMatrix | None = None
        self._positions: TermPositions | None = None

    @classmethod
    def of(cls, forms: Sequence[WeightForm]) -> list[LensRequests]:
        """All forms, in as few launches as have room for them."""
        found: list[LensRequests] = []
        for form in forms:
            requests = next((requests for requests in found if requests._has_room(form)), None)
            if requests is None:
                requests = cls()
                found.append(requests)
            requests._add(form)
        return found

    @property
    def is_heavy(self) -> bool:
        """Whether distances, the matrix, or largest weights that are many or beside cells need more registers."""
        largest = 0 if self._largest is None else self._largest.weights.shape[-1]
        many = largest > (FEW if self._cells is None else 0)
        return self._positions is not None or self._matrix is not None or many

    def _has_room(self, form: WeightForm) -> bool:
        """Whether a form fits beside those that are there: of what fills registers, there is one kind in a launch."""
        if self._matrix is not None or isinstance(form, WeightMatrix):
            return False
        if isinstance(form, LargestWeights):
            return self._largest is None and self._positions is None and form.weights.shape[-1] <= MOST_BESIDE
        if self._largest is not None and self._largest.weights.shape[-1] > MOST_BESIDE:
            return False
        if isinstance(form, DistanceSums):
            return self._distances is None and self._cells is None and self._largest is None and self._agrees(form)
        if isinstance(form, CellReduction):
            return self._distances is None and self._agrees(form) and self._same_cells(form)
        return self._agrees(form)

    def _same_cells(self, form: CellReduction) -> bool:
        known = self._cells
        return known is None or (known.rows.equal(form.rows) and known.columns.equal(form.columns))

    def _agrees(self, form: RowSums | ColumnSums | CellReduction | DistanceSums) -> bool:
        """Whether its positions are those of the others, if both have some."""
        known, positions = self._positions, form.positions
        if positions is None or known is None:
            return True
        return positions.queries is known.queries and positions.keys is known.keys

    def _add(self, form: WeightForm) -> None:
        match form:
            case RowSums():
                self._add_sums("rows", form.term, form.into)
            case ColumnSums():
                self._add_sums("columns", form.term, form.into)
            case CellReduction():
                self._cells = form
                self._add_sums("cells", form.term if form.is_sum else "maxima", form.into)
            case DistanceSums():
                self._distances = form
                self._add_sums("rows", "weight", form.mass)
                self._add_sums("rows", "weight_distance", form.moments)
            case LargestWeights():
                self._largest = form
            case WeightMatrix():
                self._matrix = form
        if not isinstance(form, LargestWeights | WeightMatrix) and form.positions is not None:
            self._positions = form.positions

    def _add_sums(self, kind: str, term: str, into: Tensor) -> None:
        self._sums.setdefault((kind, term), []).append(into)

    def arguments(self, device: torch.device, rows: int, columns: int) -> WantedSums:
        """What the kernel gets, for tiles of this size."""
        self._totals = {
            place: targets[0] if len(targets) == 1 else torch.zeros_like(targets[0])
            for place, targets in self._sums.items()
        }
        positions = PositionsArgument() if self._positions is None else _relative(self._positions)
        return WantedSums(
            rows=self._terms("rows"),
            columns=self._terms("columns"),
            cells=CellsArgument() if self._cells is None else self._cells_argument(self._cells, device, rows, columns),
            histogram=self._histogram(positions, rows, columns),
            largest=LargestArgument()
            if self._largest is None
            else LargestArgument(self._largest.weights, self._largest.columns),
            matrix=MatrixArgument() if self._matrix is None else MatrixArgument(StridedRows.of(self._matrix.into)),
            positions=positions,
        )

    def finish(self) -> None:
        """Add sums that several forms have asked for to each of them."""
        for place, targets in self._sums.items():
            for target in targets if len(targets) > 1 else []:
                if place[1] == "maxima":
                    torch.maximum(target, self._totals[place], out=target)
                else:
                    target.add_(self._totals[place])

    def _terms(self, kind: str) -> TermSums:
        return TermSums(
            **{term: total for (of, term), total in self._totals.items() if of == kind and term != "maxima"}
        )

    def _cells_argument(self, cells: CellReduction, device: torch.device, rows: int, columns: int) -> CellsArgument:
        maxima = self._totals.get(("cells", "maxima"))
        tensors = cells.rows, cells.columns, _cell_ranges(cells.rows, rows), _cell_ranges(cells.columns, columns)
        return CellsArgument(
            self._terms("cells"),
            None if maxima is None else maxima.view(torch.int32),
            *_copies(tensors, device),
            height=cells.into.shape[2],
            width=cells.into.shape[3],
        )

    def _histogram(self, positions: PositionsArgument, rows: int, columns: int) -> HistogramArgument:
        form = self._distances
        if form is None or positions.queries is None or positions.keys is None:
            return HistogramArgument()
        edges = form.edges.clamp(max=LAST).int()
        ends = torch.cat([edges.new_full((1,), -1), edges, edges.new_full((1,), LAST)])
        ranges = _ranges(positions.queries, rows), _ranges(positions.keys, columns)
        return HistogramArgument(form.histogram, ends, *ranges, form.histogram.shape[-1])


def _relative(positions: TermPositions) -> PositionsArgument:
    """Positions as int32, from the first key's on."""
    first = positions.keys[:1]
    return PositionsArgument(
        *((each - first).clamp(-FARTHEST, FARTHEST).int() for each in (positions.queries, positions.keys))
    )


def _ranges(positions: Tensor, size: int) -> Tensor:
    """The smallest and the largest position of each tile: (tiles, 2)."""
    filled = torch.cat([positions, positions[-1:].expand(-len(positions) % size)]).view(-1, size)
    return torch.stack(filled.aminmax(dim=-1), -1).contiguous()


def _cell_ranges(cells: Tensor, size: int) -> Tensor:
    """The first and the last cell of each tile: (tiles, 2); the last before the first where there is none."""
    filled = torch.cat([cells, cells.new_full((-len(cells) % size,), -1)]).view(-1, size)
    return torch.stack([filled.masked_fill(filled < 0, LAST).amin(-1), filled.amax(-1).clamp(min=-1)], -1)


def _copies(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Whole numbers on the CPU as int32 on a device, in one copy that is not waited for."""
    sizes = [-(-tensor.numel() // 4) * 4 for tensor in tensors]  # each from a multiple of 16 bytes on
    packed = torch.zeros(sum(sizes), dtype=torch.int32, device="cpu")
    for tensor, part in zip(tensors, packed.split(sizes), strict=True):
        part[: tensor.numel()] = tensor.flatten()
    found = packed.to(device, non_blocking=True).split(sizes)
    return [part[: tensor.numel()] for tensor, part in zip(tensors, found, strict=True)]
