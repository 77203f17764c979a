"""Pictures of masks: text for a terminal, a matplotlib figure for a page."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, overload

import torch
from torch import Tensor

from .. import plots
from ..core.grid import Blocks, Grid
from ..core.intervals import FULL, PARTIAL, Ternary
from ..errors import MaskError, MissingExtra, ShapeError
from ..plots.mask_plot import verdict_names
from .index_checks import checked_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The most cells of a text, which fits 80 columns and whose characters are twice as high as wide, and of a figure.
TEXT_ROWS, TEXT_COLUMNS, FIGURE_CELLS = 32, 64, 256
SIGNS = "·▒█"
LONGEST_TITLE = 78

# Up to so many pairs are evaluated one by one; beyond, a picture is drawn from tiles, and a sample gives the density.
FEW_PAIRS, SAMPLED_PAIRS = 2**20, 2**21
SMALLEST_TILE, MOST_TILES = 128, 1024


class Evaluable(Protocol):
    """A mask, as far as it is drawn: its checked values on pairs and on tiles."""

    @overload
    def evaluate(self, grid: Grid) -> Tensor: ...

    @overload
    def evaluate(self, grid: Blocks) -> Ternary: ...


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """The pairs of one batch row and one head, queries from top to bottom, keys from left to right.

    `str(drawing)` is the text, which a Python prompt displays too; `drawing.figure()` is the figure, which a notebook
    displays. Both are rendered on demand. Small masks are drawn pair by pair, large ones tile by tile, where PARTIAL
    includes tiles that interval arithmetic cannot decide.
    """

    mask: Evaluable
    grid: Grid
    batch: int
    head: int

    def __str__(self) -> str:
        queries, keys = self.grid.shape
        size = _cell(queries, TEXT_ROWS), _cell(keys, TEXT_COLUMNS)
        rows = ["".join(SIGNS[verdict] for verdict in row) for row in self.cells(size).tolist()]
        labels = [str(position) for position in self._positions(self.grid.query_positions)[:: size[0]]]
        width = max(map(len, labels))
        lines = [f"{'':8}{labels[row] if row % 4 == 0 else '':>{width}} {cells}" for row, cells in enumerate(rows)]
        lines[0] = "queries" + lines[0][7:]
        ruler = _ruler(self._positions(self.grid.key_positions)[:: size[1]])
        signs = zip(SIGNS, verdict_names(size), strict=True)
        legend = "  ".join(f"{sign} {name}" for sign, name in reversed([*signs]) if name)
        return "\n".join([self.title, self.subtitle(size), f"{'keys':>{8 + width}} {ruler}", *lines, legend])

    def __repr__(self) -> str:
        return str(self)

    def figure(self) -> Figure:
        """A matplotlib figure; `figure.savefig("mask.png")` writes it.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        size = tuple(_cell(length, FIGURE_CELLS) for length in self.grid.shape)
        return plots.tiles(
            self.cells(size),
            size,
            query_positions=self._positions(self.grid.query_positions),
            key_positions=self._positions(self.grid.key_positions),
            title=self.title,
            subtitle=self.subtitle(size),
        )

    def _repr_png_(self) -> bytes | None:
        """The PNG that a notebook displays; None without matplotlib, and the notebook displays the text."""
        try:
            figure = self.figure()
        except MissingExtra:
            return None
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=120)
        return png.getvalue()

    @property
    def title(self) -> str:
        """The `repr` of the mask, shortened, with the batch row and head that are drawn."""
        *batch, heads = (1, 1, *self.mask.evaluate(self.grid.tile(slice(0, 1), slice(0, 1))).shape[:-2])
        sizes = {"batch": (self.batch, torch.Size(batch).numel()), "head": (self.head, heads)}
        selected = [f", {name} {number} of {size}" for name, (number, size) in sizes.items() if size > 1]
        text = repr(self.mask)
        longest = LONGEST_TITLE - sum(map(len, selected))
        return "".join([text if len(text) <= longest else text[: longest - 1] + "…", *selected])

    def subtitle(self, size: tuple[int, ...]) -> str:
        """The number of pairs, the share that exists, and the pairs per cell."""
        queries, keys = self.grid.shape
        cell = "" if size == (1, 1) else f"; a cell is {size[0]:,} × {size[1]:,}"
        return f"{queries:,} × {keys:,} pairs{cell}; {self.density()} exist"

    def cells(self, size: tuple[int, ...]) -> Tensor:
        """The state of each cell, EMPTY, PARTIAL or FULL: int8 (rows, columns)."""
        blocks = Blocks.from_grid(self.grid, size)  # type: ignore[arg-type]
        if self._is_drawn_by_pairs:
            return blocks.cut(self.selected(self.mask.evaluate(self.grid)).expand(self.grid.shape)).verdicts
        return self.selected(self.mask.evaluate(blocks).verdicts).expand(blocks.shape)

    def density(self) -> str:
        """The share of the pairs that exist, as text; estimated from a sample if too many tiles are PARTIAL."""
        queries, keys = self.grid.shape
        if self._is_drawn_by_pairs:
            kept = self.selected(self.mask.evaluate(self.grid)).expand(queries, keys)
            return _share(int(kept.sum()) / (queries * keys))
        blocks = Blocks.from_grid(self.grid, max(SMALLEST_TILE, _cell(max(queries, keys), MOST_TILES)))
        verdicts = self.selected(self.mask.evaluate(blocks).verdicts).expand(blocks.shape)
        partial = (verdicts == PARTIAL).nonzero()
        sample = partial[_sample(len(partial), max(1, SAMPLED_PAIRS // blocks.rows**2))]
        kept, evaluated = 0, 0
        for row, column in sample.tolist():
            tile = blocks.tile(row, column)
            kept += int(self.selected(self.mask.evaluate(tile)).expand(tile.shape).sum())
            evaluated += tile.shape[0] * tile.shape[1]
        unknown = int(((verdicts == PARTIAL) * blocks.areas).sum())
        full = int(((verdicts == FULL) * blocks.areas).sum())
        share = (full + unknown * kept / max(evaluated, 1)) / (queries * keys)
        return _share(share) if len(sample) == len(partial) else f"about {100 * share:.2g} %"

    @property
    def _is_drawn_by_pairs(self) -> bool:
        """Whether there are few enough pairs to evaluate the mask on each."""
        return self.grid.shape[0] * self.grid.shape[1] <= FEW_PAIRS

    def selected(self, pairs: Tensor) -> Tensor:
        """The part of a tensor over (..., heads, rows, columns) for the batch row and head that are drawn."""
        if pairs.ndim > 2:
            pairs = _select("head", self.head, pairs, -3)
        if pairs.ndim > 2:
            pairs = _select("batch", self.batch, pairs.flatten(0, -3), 0)
        return pairs

    def _positions(self, positions: Tensor) -> list[int]:
        if positions.ndim > 1:
            positions = _select("batch", self.batch, positions.flatten(0, -2), 0)
        return positions.tolist()


def draw(mask: Evaluable, grid: Grid, batch: int, head: int) -> Drawing:
    """A `Drawing`; the mask is evaluated on one pair and on one tile first, so that errors are raised here."""
    checked_count("draw's batch", batch)
    checked_count("draw's head", head)
    if 0 in grid.shape:
        raise ShapeError(f"draw: {grid.shape[0]} queries × {grid.shape[1]} keys are no pairs; there is nothing to draw")
    drawing = Drawing(mask, grid, batch, head)
    drawing.selected(mask.evaluate(grid.tile(slice(0, 1), slice(0, 1))))
    drawing.cells(grid.shape)
    return drawing


def _select(name: str, number: int, tensor: Tensor, axis: int) -> Tensor:
    size = tensor.shape[axis]
    if size == 1:
        return tensor.select(axis, 0)
    if number >= size:
        raise MaskError(f"draw's {name} is {number}, but the mask has {size}, numbered from 0: {name} 0 to {size - 1}")
    return tensor.select(axis, number)


def _cell(length: int, most: int) -> int:
    """The least power of 2 that divides a length into at most `most` cells."""
    return 1 << max(0, (-(-length // most) - 1).bit_length())


def _ruler(positions: list[int]) -> str:
    """Key positions above their columns, as many as fit without touching."""
    longest = max(len(str(position)) for position in positions)
    step = next(step for step in (4, 8, 16, 32) if step > longest + 1 or step == 32)
    return "".join(f"{position:<{step}}" for position in positions[::step]).rstrip()


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def _sample(length: int, number: int) -> Tensor:
    """`number` indices below `length`, pseudo-random so that no mask has the same pattern; always the same ones."""
    if length <= number:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(0))[:number]
