"""Plot thumbnails of every head of every layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, ShapeError, require
from regard.plots.colours import ColourScale, Scale, add_colour_bar, colour_maximum
from regard.plots.figures import PLAIN, draw_notes, draw_title, fit_figure, new_axes, wrap_notes
from regard.plots.labels import font_families, phrase, shortened
from regard.plots.pooling import CellAxis, numbers, reduced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Place = tuple[int, int]
"""(layer, head), counted from 0."""

# Inches.
_LARGEST, _SMALLEST = 1.6, 0.3
_PAGE = 8.0
_LINE = 0.14  # of text
_GAP = 0.08

_MOST_CELLS = 64  # of a side of a thumbnail
_MOST_PIXELS = 96
_MOST_OBLONG = 2.0
_BADGE = 17  # characters in an inch
_MOST_LINES = 2  # of a badge
_MOST_HEADS = 20_000  # thumbnails


def grid(
    weights_by_layer: Sequence[ArrayLike | Tensor] | ArrayLike | Tensor,
    *,
    scale: Scale = "linear",
    shared: bool = True,
    badges: Mapping[Place, str] | None = None,
    order: Sequence[Place] | None = None,
    title: str | None = None,
    unit: str = "weight",
) -> Figure:
    """A matplotlib figure of every head: a row for each layer and a column for each head, both counted from 0.

    `weights_by_layer` has for each layer the weights [heads, M, N] of one sentence; heads, M and N may differ between
    layers. Maps longer than 64 tokens are pooled to the largest weight of each cell, and the figure notes it.

    The colour scale is `shared`, from 0 to the greatest weight of all heads, or each head has its own. `badges` are
    short texts below heads, such as roles, by (layer, head). `order` lists heads as (layer, head), all or some, in the
    order in which they are drawn: from left to right and from top to bottom, each with "layer.head" above it.

    The thumbnails are one raster image; everything else is lines and text. The figure is not registered with pyplot.

    Raises:
        ShapeError: a layer that is not [heads, M, N] or is empty; no layer at all.
        ConfigurationError: negative weights; a head in `badges` or `order` that does not exist or occurs twice; an
            unknown scale.
        MissingExtra: matplotlib is not installed.

    >>> figure = grid([[[[1.0, 0.0], [0.5, 0.5]]] * 3] * 2)  # two layers of three heads
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['0', '1', '2']
    """
    layers = _layers(weights_by_layer)
    heads = {(layer, number): one for layer, some in enumerate(layers) for number, one in enumerate(some)}
    _check_places("badges", badges or {}, layers)
    if order is not None:
        _check_places("order", order, layers)
    chosen = heads if order is None else order
    thumbnails = {place: _Thumbnail.from_weights(weights) for place, weights in heads.items() if place in chosen}
    values = {place: thumbnail.values for place, thumbnail in thumbnails.items()}
    if not shared:
        values = {place: one / colour_maximum(one) for place, one in values.items()}
        unit = f"{unit}, of each head's greatest"
    every = numpy.ma.concatenate([one.ravel() for one in values.values()])
    if every.count() and float(every.min()) < 0:
        raise ConfigurationError(
            f"weights go down to {float(every.min()):.6g}; weights are not negative: for scores, draw a heatmap of each"
        )
    colouring = ColourScale.for_weights(every, scale, None, unit)
    layout = _GridLayout.for_thumbnails(thumbnails, layers, order, badges or {})
    return _draw(layout, values, colouring, title, [*_notes(thumbnails, shared), *colouring.notes(every)])


@dataclass(frozen=True)
class _Thumbnail:
    """The weights of a head, pooled to at most 64 × 64 cells, and the size of a cell."""

    values: numpy.ma.MaskedArray
    cell: tuple[str, str]
    broken: bool

    @classmethod
    def from_weights(cls, weights: Tensor) -> _Thumbnail:
        down, across = (CellAxis.uniform([""] * n, -(-n // _MOST_CELLS)) for n in weights.shape)
        values = reduced(numpy.maximum, weights.to(torch.float64).numpy(), down.edges, across.edges)
        finite = numpy.ma.masked_invalid(values)
        return cls(finite, (str(down), str(across)), finite.count() < finite.size)

    @property
    def pooled(self) -> bool:
        return self.cell != ("1", "1")


@dataclass(frozen=True)
class _GridLayout:
    """The row and column of each head in the table, and sizes in pixels of the raster image, down and across."""

    cells: dict[Place, tuple[int, int]]
    table: tuple[int, int]
    pixels: tuple[int, int]
    inch: tuple[float, float]  # in pixels
    badges: dict[Place, list[str]]
    sorted: bool

    @classmethod
    def for_thumbnails(
        cls,
        thumbnails: Mapping[Place, _Thumbnail],
        layers: list[Tensor],
        order: Sequence[Place] | None,
        badges: Mapping[Place, str],
    ) -> _GridLayout:
        if order is None:
            cells, table = {place: place for place in thumbnails}, (len(layers), max(map(len, layers)))
        else:
            rows = -(-len(order) // max(*map(len, layers), math.ceil(math.sqrt(len(order)))))
            table = rows, -(-len(order) // rows)
            cells = {place: divmod(number, table[1]) for number, place in enumerate(order)}
        shapes = [one.values.shape for one in thumbnails.values()]
        down, across = max(m for m, _ in shapes), max(n for _, n in shapes)
        pixels = down * max(1, _MOST_PIXELS // down), across * max(1, _MOST_PIXELS // across)
        wide = min(_LARGEST, max(_SMALLEST, _PAGE / table[1] - _GAP))
        high = wide * min(max(down / across, 1 / _MOST_OBLONG), _MOST_OBLONG)
        texts = {place: _badge(text, wide) for place, text in badges.items() if place in cells}
        return cls(cells, table, pixels, (pixels[0] / high, pixels[1] / wide), texts, order is not None)

    @property
    def above(self) -> int:
        """Pixels above each thumbnail, for its label."""
        return round(_LINE * self.inch[0]) if self.sorted else 0

    @property
    def step(self) -> tuple[int, int]:
        """Pixels between the corners of neighbouring thumbnails."""
        lines = max(map(len, self.badges.values()), default=0)
        below = round((_GAP + _LINE * lines) * self.inch[0])
        return self.pixels[0] + self.above + below, self.pixels[1] + round(_GAP * self.inch[1])

    @property
    def raster(self) -> tuple[int, int]:
        """The size of the whole raster image in pixels."""
        down, across = (count * step for count, step in zip(self.table, self.step, strict=True))
        return down, across - round(_GAP * self.inch[1])

    def corner(self, place: Place) -> tuple[int, int]:
        """The top and left pixel of a thumbnail."""
        row, column = self.cells[place]
        return row * self.step[0] + self.above, column * self.step[1]


def _badge(text: str, wide: float) -> list[str]:
    """A badge, wrapped to the width of a thumbnail."""
    most = max(4, int(wide * _BADGE))
    lines = textwrap.wrap(phrase(text, _MOST_LINES * most), most, break_long_words=False) or [""]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], " ".join(lines[_MOST_LINES - 1 :])]
    return [shortened(line, most) for line in lines]


def _draw(
    layout: _GridLayout,
    values: Mapping[Place, numpy.ma.MaskedArray],
    colouring: ColourScale,
    title: str | None,
    notes: list[str],
) -> Figure:
    high, wide = (pixels / inch for pixels, inch in zip(layout.raster, layout.inch, strict=True))
    axes = new_axes(wide + 1.5)
    extent = (0, layout.raster[1], layout.raster[0], 0)
    axes.imshow(
        _raster(layout, values, colouring),
        extent=extent,
        aspect=layout.inch[1] / layout.inch[0],
        interpolation="nearest",
    )
    _number(axes, layout)
    _frame(axes, layout)
    family = font_families("".join("".join(lines) for lines in layout.badges.values()))
    for place in layout.cells:
        top, left = layout.corner(place)
        small = {"fontsize": 7, "ha": "center", **PLAIN}
        middle, gap = left + layout.pixels[1] / 2, 0.03 * layout.inch[0]
        if layout.sorted:
            axes.text(middle, top - gap, f"{place[0]}.{place[1]}", va="bottom", **small)
        if layout.badges.get(place):
            badge = "\n".join(layout.badges[place])
            axes.text(
                middle, top + layout.pixels[0] + gap, badge, va="top", fontfamily=family, linespacing=1.1, **small
            )
    mappable = require("matplotlib.cm", extra="plots").ScalarMappable(colouring.norm, colouring.map)
    tall = min(high, 3.0)
    add_colour_bar(axes, mappable, colouring, (1 + 0.14 / wide, 1 - tall / high, 0.14 / wide, tall / high))
    draw_title(axes, title, wide, above=0 if layout.sorted else 26)
    draw_notes(axes, wrap_notes(notes, wide))
    return fit_figure(axes, (wide, high))


def _raster(layout: _GridLayout, values: Mapping[Place, numpy.ma.MaskedArray], colouring: ColourScale) -> numpy.ndarray:
    """All thumbnails as one opaque RGB image: with transparency a PDF would have two."""
    raster = numpy.full((*layout.raster, 3), 255, numpy.uint8)
    for place, cells in values.items():
        top, left = layout.corner(place)
        down, across = (numpy.arange(p) * n // p for p, n in zip(layout.pixels, cells.shape, strict=True))
        colours = colouring.map(colouring.norm(cells[down][:, across]), bytes=True)
        raster[top : top + layout.pixels[0], left : left + layout.pixels[1]] = colours[..., :3]
    return raster


def _number(axes: Axes, layout: _GridLayout) -> None:
    """Label rows with layers and columns with heads, where heads are in their own order."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelsize=8, top=True, labeltop=True, bottom=False, labelbottom=False)
    if layout.sorted:
        axes.set(xticks=[], yticks=[])
        return
    (down, across), (rows, columns) = layout.step, layout.table
    axes.set_xticks([n * across + layout.pixels[1] / 2 for n in range(columns)], labels=[*map(str, range(columns))])
    axes.set_yticks([n * down + layout.pixels[0] / 2 for n in range(rows)], labels=[*map(str, range(rows))])
    axes.set_ylabel("layer", fontsize=9, color="0.35", **PLAIN)
    above = {"xytext": (0, 16), "textcoords": "offset points", "xycoords": "axes fraction"}
    axes.annotate("head", (0.5, 1), fontsize=9, color="0.35", ha="center", va="bottom", **above, **PLAIN)


def _frame(axes: Axes, layout: _GridLayout) -> None:
    """A thin frame around each thumbnail."""
    rectangle = require("matplotlib.patches", extra="plots").Rectangle
    collection = require("matplotlib.collections", extra="plots").PatchCollection
    boxes = [rectangle(layout.corner(place)[::-1], layout.pixels[1], layout.pixels[0]) for place in layout.cells]
    axes.add_collection(collection(boxes, facecolor="none", edgecolor="0.6", linewidth=0.4), autolim=False)


def _layers(weights_by_layer: Sequence[ArrayLike | Tensor] | ArrayLike | Tensor) -> list[Tensor]:
    items = weights_by_layer if isinstance(weights_by_layer, (list, tuple)) else [*numbers(weights_by_layer)]
    layers = [numbers(one, f"weights_by_layer[{number}]") for number, one in enumerate(items)]
    if not layers:
        raise ShapeError("weights_by_layer has no layer; it needs weights [heads, rows, columns] for one or more")
    for number, one in enumerate(layers):
        if one.ndim != 3 or not one.numel():
            which = "choose one sentence, for instance [weights[0] for weights in weights_by_layer]"
            raise ShapeError(
                f"weights_by_layer[{number}] is {list(one.shape)}; it needs to be [heads, rows, columns] with at least "
                f"one of each{f': {which}' if one.ndim == 4 else ''}"
            )
    if sum(map(len, layers)) > _MOST_HEADS:
        raise ShapeError(f"{sum(map(len, layers)):,} heads are more than a page holds; draw {_MOST_HEADS:,} at most")
    return layers


def _check_places(name: str, places: Sequence[Place] | Mapping[Place, str], layers: list[Tensor]) -> None:
    has = f"{len(layers)} layers of {min(map(len, layers))} to {max(map(len, layers))} heads, counted from 0"
    if not places and name == "order":
        raise ConfigurationError("order has no head; it needs one or more (layer, head), or None for all of them")
    for place in places:
        known = isinstance(place, tuple) and len(place) == 2 and 0 <= place[0] < len(layers)
        if not (known and 0 <= place[1] < len(layers[place[0]])):
            raise ConfigurationError(f"{name} names {place!r}; it needs (layer, head), and there are {has}")
    twice = [place for number, place in enumerate(places) if place in list(places)[:number]]
    if twice:
        raise ConfigurationError(f"{name} names {twice[0]!r} twice; each head is drawn once")


def _notes(thumbnails: Mapping[Place, _Thumbnail], shared: bool) -> list[str]:
    pooled = sorted({one.cell for one in thumbnails.values() if one.pooled})
    sizes = " or ".join(" × ".join(cell) for cell in pooled[:3])
    return [
        *([f"each cell: max of {sizes} weights"] if pooled else []),
        *([] if shared else ["each head has its own scale, from 0 to its greatest weight"]),
        *(["grey: NaN or infinity"] if any(one.broken for one in thumbnails.values()) else []),
    ]
