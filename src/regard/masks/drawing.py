"""A mask as a picture: text for a terminal, a figure for a page."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import plots
from ..core.grid import Blocks, Grid
from ..core.intervals import FULL, PARTIAL
from ..errors import MaskError, MissingExtra, ShapeError
from ..plots.mask_plot import verdict_names
from .index_checks import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .base import Mask

# The most cells of a text, which fits 80 columns and whose characters are twice as high as wide, and of a figure.
TEXT_ROWS, TEXT_COLUMNS, FIGURE_CELLS = 32, 64, 256
SIGNS = "·▒█"
LONGEST_TITLE = 78

# So many pairs are looked at one by one; beyond, a picture is drawn from tiles, and some of them tell the density.
FEW_PAIRS, SAMPLED_PAIRS = 2**20, 2**21
SMALLEST_TILE, MOST_TILES = 128, 1024


@dataclass(frozen=True, eq=False, repr=False)
class Drawing:
    """The pairs of one sentence and one head, queries from top to bottom, keys from left to right.

    `str(drawing)` is the text, which a Python prompt shows too; `drawing.figure()` is the figure, which a notebook
    shows. Either is drawn when it is asked for. Small masks are drawn pair by pair, large ones tile by tile, where
    PARTIAL also stands for tiles that interval arithmetic does not tell of.
    """

    mask: Mask
    grid: Grid
    batch: int
    head: int

    def __str__(self) -> str:
        queries, keys = self.grid.shape
        size = _cell(queries, TEXT_ROWS), _cell(keys, TEXT_COLUMNS)
        rows = ["".join(SIGNS[verdict] for verdict in row) for row in self.cells(size).tolist()]
        at = [str(position) for position in self._positions(self.grid.query_positions)[:: size[0]]]
        width = max(map(len, at))
        lines = [f"{'':8}{at[row] if row % 4 == 0 else '':>{width}} {cells}" for row, cells in enumerate(rows)]
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
        """What a notebook shows; without matplotlib, it shows the text."""
        try:
            figure = self.figure()
        except MissingExtra:
            return None
        page = io.BytesIO()
        figure.savefig(page, format="png", dpi=120)
        return page.getvalue()

    @property
    def title(self) -> str:
        """The mask as it was written, and which of the batch and of the heads is shown."""
        *batch, heads = (1, 1, *self.mask.evaluate(self.grid.tile(slice(0, 1), slice(0, 1))).shape[:-2])
        sizes = {"batch": (self.batch, torch.Size(batch).numel()), "head": (self.head, heads)}
        shown = [f", {name} {number} of {size}" for name, (number, size) in sizes.items() if size > 1]
        written = repr(self.mask)
        longest = LONGEST_TITLE - sum(map(len, shown))
        return "".join([written if len(written) <= longest else written[: longest - 1] + "…", *shown])

    def subtitle(self, size: tuple[int, ...]) -> str:
        """How many pairs there are, how many of them exist, and how many a cell stands for."""
        queries, keys = self.grid.shape
        cell = "" if size == (1, 1) else f"; a cell is {size[0]:,} × {size[1]:,}"
        return f"{queries:,} × {keys:,} pairs{cell}; {self.density()} exist"

    def cells(self, size: tuple[int, ...]) -> Tensor:
        """What exists in each tile, EMPTY, PARTIAL or FULL: int8 (rows, columns)."""
        blocks = Blocks.of(self.grid, size)  # type: ignore[arg-type]
        if self._few:
            return blocks.cut(self.shown(self.mask.evaluate(self.grid)).expand(self.grid.shape)).verdicts
        return self.shown(self.mask.evaluate(blocks).verdicts).expand(blocks.shape)

    def density(self) -> str:
        """The share of the pairs that exist, as text; of too many tiles that are PARTIAL, some tell of the others."""
        queries, keys = self.grid.shape
        if self._few:
            kept = self.shown(self.mask.evaluate(self.grid)).expand(queries, keys)
            return _share(int(kept.sum()) / (queries * keys))
        blocks = Blocks.of(self.grid, max(SMALLEST_TILE, _cell(max(queries, keys), MOST_TILES)))
        verdicts = self.shown(self.mask.evaluate(blocks).verdicts).expand(blocks.shape)
        partial = (verdicts == PARTIAL).nonzero()
        asked = partial[_spread(len(partial), max(1, SAMPLED_PAIRS // blocks.rows**2))]
        kept, looked_at = 0, 0
        for row, column in asked.tolist():
            tile = blocks.tile(row, column)
            kept += int(self.shown(self.mask.evaluate(tile)).expand(tile.shape).sum())
            looked_at += tile.shape[0] * tile.shape[1]
        unknown = int(((verdicts == PARTIAL) * blocks.areas).sum())
        full = int(((verdicts == FULL) * blocks.areas).sum())
        share = (full + unknown * kept / max(looked_at, 1)) / (queries * keys)
        return _share(share) if len(asked) == len(partial) else f"about {100 * share:.2g} %"

    @property
    def _few(self) -> bool:
        """Whether all pairs are looked at."""
        return self.grid.shape[0] * self.grid.shape[1] <= FEW_PAIRS

    def shown(self, pairs: Tensor) -> Tensor:
        """What is said of the sentence and the head that are drawn."""
        if pairs.ndim > 2:
            pairs = _chosen("head", self.head, pairs, -3)
        if pairs.ndim > 2:
            pairs = _chosen("batch", self.batch, pairs.flatten(0, -3), 0)
        return pairs

    def _positions(self, positions: Tensor) -> list[int]:
        if positions.ndim > 1:
            positions = _chosen("batch", self.batch, positions.flatten(0, -2), 0)
        return positions.tolist()


def draw(mask: Mask, grid: Grid, batch: int, head: int) -> Drawing:
    """A mask that does not fit the grid says so now: it is asked about one pair, and about all of them as one tile."""
    count("draw's batch", batch)
    count("draw's head", head)
    if 0 in grid.shape:
        raise ShapeError(f"draw: {grid.shape[0]} queries × {grid.shape[1]} keys are no pairs; there is nothing to draw")
    drawing = Drawing(mask, grid, batch, head)
    drawing.shown(mask.evaluate(grid.tile(slice(0, 1), slice(0, 1))))
    drawing.cells(grid.shape)
    return drawing


def _chosen(name: str, number: int, tensor: Tensor, axis: int) -> Tensor:
    size = tensor.shape[axis]
    if size == 1:
        return tensor.select(axis, 0)
    if number >= size:
        raise MaskError(f"draw's {name} is {number}, but the mask has {size}, numbered from 0: {name} 0 to {size - 1}")
    return tensor.select(axis, number)


def _cell(length: int, most: int) -> int:
    """The least power of 2 that cuts a length to no more than `most` cells."""
    return 1 << max(0, (-(-length // most) - 1).bit_length())


def _ruler(positions: list[int]) -> str:
    """Positions over the columns that they belong to, as many as stay apart."""
    longest = max(len(str(position)) for position in positions)
    step = next(step for step in (4, 8, 16, 32) if step > longest + 1 or step == 32)
    return "".join(f"{position:<{step}}" for position in positions[::step]).rstrip()


def _share(share: float) -> str:
    return f"{100 * share:.3g} %"


def _spread(length: int, number: int) -> Tensor:
    """`number` of `length`, drawn without a pattern that a mask might share, the same ones each time."""
    if length <= number:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(0))[:number]
