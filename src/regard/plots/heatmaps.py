"""Plot a matrix of weights, or the difference of two, as a heat map with labelled tokens, and profiles beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, ShapeError, require
from regard.plots.colours import HEADS, ColourScale, Scale, add_colour_bar, format_number
from regard.plots.figures import (
    NOTE,
    PLAIN,
    POINTS,
    SMALLEST_LABELLED_CELL,
    AxisLabels,
    CellGeometry,
    draw_notes,
    draw_title,
    fit_figure,
    label_axis,
    new_axes,
    ordinal,
    text_width,
    wrap_notes,
)
from regard.plots.labels import font_families, phrase, token_label
from regard.plots.pooling import CellAxis, PooledWeights, Pooling, matrix, numbers, pool_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_COLOUR_BAR = 0.14  # inches
SMALLEST_ANNOTATED_CELL = 0.3
"""Inches of a cell that has room for a number of two decimals in type of 7 points."""
_LARGEST_NUMBER = 8.0  # points
_DARK = 0.45  # luminance below which text is white


@dataclass(frozen=True)
class Heatmap:
    """A heat map: pooled weights, their colours, title and notes.

    `right` and `below` reserve inches for other axes, between the map and its colour bar, and below it. Without a
    colouring only the grid is drawn. `noun` is what a row or a column stands for. `annotated`: each cell has its
    number. `names` are those of the axes: down the side, and below.
    """

    pooled: PooledWeights
    colouring: ColourScale | None
    title: str | None = None
    right: float = 0.0
    below: float = 0.0
    notes: list[str] = field(default_factory=list)
    noun: str = "token"
    annotated: bool = False
    names: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        rows, columns = self.pooled.values.shape
        if self.annotated and (self.pooled.pooling_note or min(self._cell) < SMALLEST_ANNOTATED_CELL):
            raise ConfigurationError(
                f"annot writes the weight into each cell, and {rows:,} × {columns:,} cells have no room for that: draw "
                "fewer tokens, at most 23 on a side, or leave annot out"
            )

    @property
    def _cell(self) -> tuple[float, float]:
        return self.geometry.cell_width, self.geometry.cell_height

    @property
    def labels(self) -> tuple[AxisLabels, AxisLabels]:
        """The labels of rows and of columns."""
        show = token_label if self.noun == "token" else phrase
        return AxisLabels.for_axis(self.pooled.down, show), AxisLabels.for_axis(self.pooled.across, show)

    @property
    def geometry(self) -> CellGeometry:
        """The size of a cell, and the rotation of column labels."""
        return CellGeometry.for_labels(*self.labels)

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height of all cells, in inches."""
        rows, columns = self.pooled.values.shape
        return self.geometry.cell_width * columns, self.geometry.cell_height * rows

    @property
    def note_lines(self) -> list[str]:
        """The notes below the map, as lines."""
        coloured = self.colouring.notes(self.pooled.values) if self.colouring else []
        notes = [*self.pooled.notes, *coloured, *self._thinned(), *self.notes]
        return wrap_notes(notes, self.extent[0] + self.right)

    def draw(self) -> Axes:
        """Draw the map on new axes; call `fit` when everything is drawn."""
        (down, across), sheet = self.labels, self.geometry
        axes = new_axes(self.extent[0] + 2.0)
        self._fill(axes)
        if self.pooled.hidden.any():
            _hatch(axes, self.pooled.hidden)
        family = font_families("".join([*down.texts, *across.texts]))
        label_axis(axes.yaxis, down, sheet.cell_height, family)
        label_axis(axes.xaxis, across, sheet.cell_width, family, sheet.rotation)
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        self._rule(axes)
        draw_title(axes, self.title, self.extent[0] + self.right)
        if self.annotated:
            self._annotate(axes)
        below = self.below
        if self.names is not None:
            down_name, across_name = self.names
            look = {"fontsize": 9, "color": "0.35", "fontfamily": font_families("".join(self.names)), **PLAIN}
            axes.set_ylabel(down_name, **look)
            axes.annotate(
                across_name, (0.5, 0), (0, -4), "axes fraction", "offset points", ha="center", va="top", **look
            )
            below += NOTE
        draw_notes(axes, self.note_lines, below)
        return axes

    def fit(self, axes: Axes) -> Figure:
        """The figure, cropped to the map and everything added to it."""
        return fit_figure(axes, self.extent)

    def _fill(self, axes: Axes) -> None:
        """Draw the cells and the colour bar; without a colouring, set the limits of an empty grid."""
        rows, columns = self.pooled.values.shape
        aspect = self.geometry.cell_height / self.geometry.cell_width
        if self.colouring is None:
            axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect=aspect)
            return
        image = axes.imshow(
            self.pooled.values,
            cmap=self.colouring.map,
            norm=self.colouring.norm,
            aspect=aspect,
            interpolation="nearest",
        )
        width = _COLOUR_BAR / self.extent[0]
        add_colour_bar(axes, image, self.colouring, (1 + width + self.right / self.extent[0], 0, width, 1))

    def _annotate(self, axes: Axes) -> None:
        """Write each number into its cell, in white on dark colours; none into those that are hatched or grey."""
        values, hidden = self.pooled.values, self.pooled.hidden
        texts = {
            at: f"{values[at]:.2f}".replace("-", "−")
            for at in numpy.ndindex(*values.shape)
            if values[at] is not numpy.ma.masked and not hidden[at]
        }
        longest = max(map(text_width, texts.values()), default=1.0)
        size = min(_LARGEST_NUMBER, 0.9 * self.geometry.cell_width * POINTS / longest)
        image = axes.images[0]
        for (row, column), text in texts.items():
            red, green, blue, _ = image.to_rgba(values[row, column])
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < _DARK
            axes.text(
                column,
                row,
                text,
                color="white" if is_dark else "black",
                fontsize=size,
                ha="center",
                va="center",
                **PLAIN,
            )

    def _thinned(self) -> list[str]:
        """A note on which tokens are labelled, where not all are; labels of pooled cells have positions instead."""
        sides = zip(("row", "column"), (self.pooled.down, self.pooled.across), self.labels, strict=True)
        steps = {name: labels.step for name, side, labels in sides if labels.step > 1 and not side.pooled}
        if len(set(steps.values())) == 1 and len(steps) == 2:
            return [f"every {ordinal(steps['row'])} {self.noun} is named"]
        return [f"every {ordinal(step)} {name} is named" for name, step in steps.items()]

    def _rule(self, axes: Axes) -> None:
        """Draw thin lines between cells that are large enough."""
        rows, columns = self.pooled.values.shape
        if self.colouring is None or self.geometry.cell_width == self.geometry.cell_height > SMALLEST_LABELLED_CELL:
            axes.set_xticks([number + 0.5 for number in range(columns - 1)], minor=True)
            axes.set_yticks([number + 0.5 for number in range(rows - 1)], minor=True)
            colour = "0.88" if self.colouring is None else "white"
            axes.grid(which="minor", color=colour, linewidth=1.5 * self.geometry.cell_width)
            axes.tick_params(which="minor", length=0, top=False)


def _hatch(axes: Axes, hidden: numpy.ndarray) -> None:
    """Hatch the cells where no pair exists, as one patch."""
    path = require("matplotlib.path", extra="plots").Path
    patches = require("matplotlib.patches", extra="plots")
    boxes = [
        path([(x0, y0), (x1, y0), (x1, y1), (x0, y1), (x0, y0)], closed=True) for x0, y0, x1, y1 in _rectangles(hidden)
    ]
    hatched = patches.PathPatch(
        path.make_compound_path(*boxes), facecolor="white", edgecolor="0.75", hatch="/////", linewidth=0
    )
    axes.add_patch(hatched)


def _rectangles(hidden: numpy.ndarray) -> list[tuple[float, float, float, float]]:
    """Rectangles (left, top, right, bottom) that cover the cells: equal runs of consecutive rows are merged."""
    finished, growing = [], {}
    for row, cells in enumerate([*hidden, numpy.zeros(hidden.shape[1], bool)]):
        ends = numpy.flatnonzero(numpy.diff(cells, prepend=False, append=False)).tolist()
        runs = set(zip(ends[::2], ends[1::2], strict=True))
        finished += [(x0 - 0.5, growing.pop((x0, x1)) - 0.5, x1 - 0.5, row - 0.5) for x0, x1 in {*growing} - runs]
        growing |= dict.fromkeys(runs - growing.keys(), row)
    return finished


def heatmap(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str | None = None,
    maximum: float | None = None,
    scale: Scale = "linear",
    mask: ArrayLike | Tensor | None = None,
    pooling: Pooling | None = None,
    unit: str = "weight",
    annot: bool = False,
    names: tuple[str, str] | None = None,
) -> Figure:
    """A matplotlib figure of `weights` [R, C]: output tokens down the side, input tokens along the top.

    The weights are a tensor or array of any floating type, on any device. The colours go from 0 (or the least weight,
    if that is negative) to `maximum`, by default the greatest weight, on a scale that is "linear", "log" or "sqrt";
    the colour bar names the `unit`. Weights that are NaN or infinite are grey; pairs where `mask` [R, C] is False are
    hatched. Spaces are drawn as ␣. From about 60 tokens on, only every second, third, ... token is labelled.

    `annot` writes each weight into its cell, with two decimals, of at most 23 tokens on a side. `names` are those of
    the axes, such as ("Query", "Key") or ("질의", "키").

    Sides of more than 512 tokens are pooled, to the largest weight of each cell or by `pooling`, and the figure notes
    it. With `pooling`, the weights may also be pooled already, such as a level of an atlas or the result of
    `regard.lenses.Pooled`; the tokens are always all of them.

    The figure is not registered with pyplot, and no global setting of matplotlib changes. It is written by
    `regard.plots.save(figure, "attention.pdf")` or `figure.savefig("attention.png")`: one raster image, everything else
    as lines and text.

    Raises:
        ShapeError: the weights are no matrix, or do not have a row and a column for each token, or for each cell.
        DtypeError: the mask is not bool.
        ConfigurationError: an unknown scale, negative weights on another than the linear scale, a maximum below the
            least weight, or `annot` of more cells than have room for numbers.
        MissingExtra: matplotlib is not installed.

    >>> figure = heatmap([[0.9, 0.1], [0.2, 0.8]], ["das", "Haus"], ["the", "house"], annot=True, names=("질의", "키"))
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['das', 'Haus']
    >>> [text.get_text() for text in figure.axes[0].texts], figure.axes[0].get_ylabel()
    (['0.90', '0.10', '0.20', '0.80', '키'], '질의')
    """
    pooled = pool_weights(weights, rows, columns, mask=mask, pooling=pooling)
    colouring = ColourScale.for_weights(pooled.values, scale, maximum, unit)
    plot = Heatmap(pooled, colouring, title, annotated=annot, names=names)
    return plot.fit(plot.draw())


def difference(
    first: ArrayLike | Tensor,
    second: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str | None = None,
    maximum: float | None = None,
    mask: ArrayLike | Tensor | None = None,
    pooling: Pooling | None = None,
    unit: str = "difference of weights",
) -> Figure:
    """A matplotlib figure of `first` - `second`, both [R, C]: red where the first is more, blue where it is less.

    White is 0, and the colours go as far below it as above: to `maximum`, by default the greatest absolute difference.
    Each is pooled before they are subtracted. Else as `heatmap`.

    Raises:
        ShapeError: the weights are no matrices, are not of one shape, or do not fit the tokens.
        DtypeError: the mask is not bool.
        ConfigurationError: a maximum that is not above 0.
        MissingExtra: matplotlib is not installed.

    >>> figure = difference([[0.75, 0.25]], [[0.25, 0.75]], ["das"], ["the", "house"])
    >>> figure.axes[0].images[0].get_clim()
    (-0.5, 0.5)
    """
    first, second = matrix(first), matrix(second)
    if first.shape != second.shape:
        raise ShapeError(
            f"first is {list(first.shape)} and second is {list(second.shape)}; a difference needs weights of one "
            "shape, between the same tokens"
        )
    one, other = (pool_weights(weights, rows, columns, mask=mask, pooling=pooling) for weights in (first, second))
    pooled = replace(one, values=one.values - other.values)
    plot = Heatmap(pooled, ColourScale.for_differences(pooled.values, maximum, unit), title)
    return plot.fit(plot.draw())


# Inches.
_DEEP = 0.9
_GAP = 0.12
_TICKS = 0.35

_COLOUR = HEADS[0]


def profiles(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    entropy: ArrayLike | Tensor,
    received: ArrayLike | Tensor,
    title: str | None = None,
    scale: Scale = "linear",
    mask: ArrayLike | Tensor | None = None,
    pooling: Pooling | None = None,
) -> Figure:
    """A matplotlib figure of `weights` [R, C] with the `entropy` [R] of each row and the sum `received` by each column.

    The entropy, in nats, is to the right of the map; `received` [C], the sum of each column, is below it, as from
    `regard.lenses.Entropy` and `regard.lenses.Received`. Both have a number for each token, also where the map is
    pooled: then a line is the mean of a cell's tokens, and a band reaches from the least to the greatest. Numbers that
    are NaN or infinite have no line, and are counted. The map is that of `heatmap`.

    Raises:
        ShapeError: profiles that do not have a number for each token; weights that do not fit the tokens or cells.
        DtypeError: the mask is not bool.
        ConfigurationError: an unknown scale, or negative weights on another than the linear scale.
        MissingExtra: matplotlib is not installed.

    >>> weights = [[0.5, 0.5], [0.0, 1.0]]
    >>> figure = profiles(weights, ["das", "Haus"], ["the", "house"], entropy=[0.693, 0.0], received=[0.5, 1.5])
    >>> [axes.get_xlabel() for axes in figure.axes[0].child_axes][1]
    'entropy (nats)'
    """
    beside = _profile("entropy", entropy, "row", len(rows))
    below = _profile("received", received, "column", len(columns))
    pooled = pool_weights(weights, rows, columns, mask=mask, pooling=pooling)
    notes = ["profiles: mean of a cell's tokens, least to greatest"] if pooled.pooling_note else []
    for name, profile in (("entropy", beside), ("received", below)):
        if broken := int((~numpy.isfinite(profile)).sum()):
            notes.append(f"{name}: {broken:,} NaN or infinite")
    plot = Heatmap(
        pooled,
        ColourScale.for_weights(pooled.values, scale, None, "weight"),
        title,
        right=_GAP + _DEEP,
        below=_GAP + _DEEP + _TICKS / 2,
        notes=notes,
    )
    axes = plot.draw()
    wide, high = plot.extent
    right = axes.inset_axes((1 + _GAP / wide, 0, _DEEP / wide, 1))
    _draw(right, beside, pooled.down, upright=False)
    right.set(ylim=axes.get_ylim(), yticks=[])
    right.set_xlabel("entropy (nats)", fontsize=8, color="0.35", **PLAIN)
    under = axes.inset_axes((0, -(_GAP + _DEEP) / high, 1, _DEEP / high))
    _draw(under, below, pooled.across, upright=True)
    under.set(xlim=axes.get_xlim(), xticks=[])
    under.set_ylabel("received\n(column sum)", fontsize=8, color="0.35", **PLAIN)
    return plot.fit(axes)


def _profile(name: str, values: ArrayLike | Tensor, side: str, count: int) -> numpy.ndarray:
    profile = numbers(values, name).to(torch.float64)
    if profile.shape != (count,):
        raise ShapeError(
            f"{name} is {list(profile.shape)}, but there are {count:,} {side}s; it needs one number for each {side}, "
            "also where the map is pooled: choose one head"
        )
    return profile.numpy()


def _draw(axes: Axes, profile: numpy.ndarray, side: CellAxis, *, upright: bool) -> None:
    """Draw steps over the cells: filled from 0, or for pooled cells the mean in a band."""
    orientation = "vertical" if upright else "horizontal"
    edges = numpy.arange(side.cells + 1) - 0.5
    finite = numpy.where(numpy.isfinite(profile), profile, numpy.nan)
    starts = side.edges[:-1]
    if side.pooled:
        # fmin and fmax pass over NaN: a cell has a band as long as one of its tokens has a number.
        low, high = numpy.fmin.reduceat(finite, starts), numpy.fmax.reduceat(finite, starts)
        known = numpy.add.reduceat(numpy.isfinite(finite).astype(float), starts)
        mean = numpy.add.reduceat(numpy.nan_to_num(finite), starts) / numpy.where(known, known, numpy.nan)
        axes.stairs(
            high, edges, baseline=low, fill=True, color=_COLOUR, alpha=0.3, orientation=orientation, linewidth=0
        )
        axes.stairs(mean, edges, baseline=None, color=_COLOUR, orientation=orientation, linewidth=0.8)
    else:
        axes.stairs(finite, edges, fill=True, color=_COLOUR, orientation=orientation)
    axes.spines[["top", "right"]].set_visible(False)
    axis = axes.yaxis if upright else axes.xaxis
    top = max(float(numpy.nanmax(finite)) if numpy.isfinite(finite).any() else 0.0, 0.0) or 1.0
    bottom = min(float(numpy.nanmin(finite)) if numpy.isfinite(finite).any() else 0.0, 0.0)
    (axes.set_ylim if upright else axes.set_xlim)(bottom, 1.05 * top)
    axis.set_ticks([0.0, top], labels=["0", format_number(top, 3)], fontsize=7, **PLAIN)
    axes.tick_params(length=2, width=0.5)
