"""Attention weights drawn as a heat map."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import require
from regard.plots.fonts import families
from regard.plots.labels import labelled, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Inches.
_LARGEST_CELL = 0.45
_SMALLEST_LABELLED_CELL = 0.15
_USUAL_SIDE = 7.0
_LONGEST_SIDE = 10.0
_COLOUR_BAR = 0.14

_POINTS = 72
_LONGEST_LABEL = 24


def heatmap(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str | None = None,
    maximum: float | None = None,
) -> Figure:
    """A matplotlib figure of `weights` [R, C]: output tokens down the side, input tokens along the top.

    The weights are a tensor or array of any floating type, on any device. The colours go from 0 (or the least weight,
    if that is negative) to `maximum`, by default the greatest weight; cells that are NaN or infinite are grey. Spaces
    are shown as ␣. From some 60 tokens on, only every second, third, ... token is named. The figure is not
    one of pyplot's, and no global setting of matplotlib changes: `figure.savefig("attention.png")` writes it.

    Raises:
        ShapeError: the weights are no matrix, or do not have a row and a column for each token.
        MissingExtra: matplotlib is not installed.

    >>> figure = heatmap([[0.9, 0.1], [0.2, 0.8]], ["das", "Haus"], ["the", "house"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['das', 'Haus']
    """
    values = labelled(weights, rows, columns).numpy()
    down, across = (Labels([_shortened(visible(token)) for token in tokens]) for tokens in (rows, columns))
    sheet = Sheet.of(down, across)
    family = families("".join([*down.texts, *across.texts, title or ""]))
    figure = require("matplotlib.figure", extra="plots").Figure(
        figsize=sheet.size(down, across, title), layout="compressed"
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes = figure.add_subplot()
    known = numpy.ma.masked_invalid(values)
    image = axes.imshow(
        known,
        cmap=require("matplotlib", extra="plots").colormaps["viridis"].with_extremes(bad="0.8"),
        vmin=min(0.0, float(known.min())) if known.count() else 0.0,
        vmax=_top(known) if maximum is None else maximum,
        aspect=sheet.cell_height / sheet.cell_width,
        interpolation="nearest",
    )
    _name_cells(axes, down, across, sheet, family)
    _add_colour_bar(axes, image, sheet)
    if title:
        axes.set_title(title, fontfamily=family, fontsize=12, parse_math=False, usetex=False)
    return figure


@dataclass(frozen=True)
class Labels:
    """The names along one side."""

    texts: list[str]

    @property
    def width(self) -> float:
        """Of the widest, in units of the font size."""
        return max(map(_width, self.texts))


@dataclass(frozen=True)
class Sheet:
    """How large things are, in inches, and whether the columns' names stand upright (0), aslant (45) or turned (90)."""

    cell_width: float
    cell_height: float
    rotation: int

    @classmethod
    def of(cls, down: Labels, across: Labels) -> Sheet:
        """Square cells, as large as the longer side allows; oblong ones only where a side is too long for its names."""
        width, height = _cell(len(across.texts)), _cell(len(down.texts))
        if min(width, height) >= _SMALLEST_LABELLED_CELL:
            width = height = min(width, height)
        else:
            width, height = min(width, _SMALLEST_LABELLED_CELL), min(height, _SMALLEST_LABELLED_CELL)
        upright = across.width * _font_size(width) / _POINTS <= 0.92 * width
        return cls(width, height, rotation=0 if upright else 45 if width >= 0.25 else 90)

    def size(self, down: Labels, across: Labels, title: str | None) -> tuple[float, float]:
        """Of the whole figure: the cells, the names before and above them, the colour bar, the title."""
        turned = math.sin(math.radians(self.rotation)) or _width("0") / across.width
        before = down.width * _font_size(self.cell_height) / _POINTS
        above = across.width * turned * _font_size(self.cell_width) / _POINTS
        wide = self.cell_width * len(across.texts) + before + 1.1
        high = self.cell_height * len(down.texts) + above + (0.8 if title else 0.4)
        return max(wide, 0.1 * len(title or "") + 0.5), max(high, 1.2)


def _cell(count: int) -> float:
    comfortable = min(_LARGEST_CELL, max(_SMALLEST_LABELLED_CELL, _USUAL_SIDE / count))
    return min(comfortable, _LONGEST_SIDE / count)


def _font_size(cell: float) -> float:
    return min(11.0, max(7.0, 0.66 * cell * _POINTS))


def _width(text: str) -> float:
    return sum(1.0 if unicodedata.east_asian_width(character) in "WF" else 0.62 for character in text)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"


def _top(known: numpy.ma.MaskedArray) -> float:
    """The greatest weight; 1 where all are 0, so that nothing is not drawn as if it were the most."""
    greatest = float(known.max()) if known.count() else 0.0
    return greatest if greatest > 0 else 1.0


def _name_cells(axes: Axes, down: Labels, across: Labels, sheet: Sheet, family: list[str]) -> None:
    style = {"fontfamily": family, "parse_math": False, "usetex": False}  # a token "$" is no formula
    slant = {"rotation": sheet.rotation, "rotation_mode": "anchor", "ha": "left", "va": "center"}
    turned = slant if sheet.rotation else {}
    for axis, labels, cell, more in (
        (axes.yaxis, down, sheet.cell_height, {}),
        (axes.xaxis, across, sheet.cell_width, turned),
    ):
        named = range(0, len(labels.texts), math.ceil(_SMALLEST_LABELLED_CELL / cell - 1e-9))
        texts = [labels.texts[number] for number in named]
        axis.set_ticks(named, labels=texts, fontsize=_font_size(cell), **style, **more)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    if sheet.cell_width == sheet.cell_height > _SMALLEST_LABELLED_CELL:
        axes.set_xticks([number + 0.5 for number in range(len(across.texts) - 1)], minor=True)
        axes.set_yticks([number + 0.5 for number in range(len(down.texts) - 1)], minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5 * sheet.cell_width)
        axes.tick_params(which="minor", length=0)


def _add_colour_bar(axes: Axes, image: AxesImage, sheet: Sheet) -> None:
    """A bar as high as the map and of one width however many columns there are."""
    width = _COLOUR_BAR / (sheet.cell_width * image.get_size()[1])
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1 + width, 0, width, 1)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
