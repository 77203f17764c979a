"""Attention weights drawn as a heat map, and the difference of two.

A picture's cells as a map with named sides: what all figures of one matrix have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy

from regard.errors import require
from regard.plots.colours import Colouring, add_bar
from regard.plots.figures import SMALLEST_LABELLED_CELL, Labels, Sheet, fit, folded, foot, head, name, ordinal, page
from regard.plots.labels import families, phrase, shown
from regard.plots.pooling import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError
from regard.plots.colours import Scale
from regard.plots.labels import matrix
from regard.plots.pooling import Cells, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR_BAR = 0.14  # inches


@dataclass(frozen=True)
class Map:
    """Where a picture goes on its page, and what is written beside it.

    `right` and `below` are inches kept for what else is drawn there: between the map and its colour bar, and under it.
    Without a colouring there is no raster. `noun` is what a row or a column stands for.
    """

    picture: Picture
    colouring: Colouring | None
    title: str | None = None
    right: float = 0.0
    below: float = 0.0
    notes: list[str] = field(default_factory=list)
    noun: str = "token"

    @property
    def labels(self) -> tuple[Labels, Labels]:
        """Down and across."""
        show = shown if self.noun == "token" else phrase
        return Labels.of(self.picture.down, show), Labels.of(self.picture.across, show)

    @property
    def sheet(self) -> Sheet:
        """How large the cells are."""
        return Sheet.of(*self.labels)

    @property
    def extent(self) -> tuple[float, float]:
        """Width and height of all cells, in inches."""
        rows, columns = self.picture.values.shape
        return self.sheet.cell_width * columns, self.sheet.cell_height * rows

    @property
    def foot(self) -> list[str]:
        """The lines below the map."""
        coloured = self.colouring.notes(self.picture.values) if self.colouring else []
        notes = [*self.picture.notes, *coloured, *self._thinned(), *self.notes]
        return folded(notes, self.extent[0] + self.right)

    def draw(self) -> Axes:
        """The axes of the map; `fit` makes the figure when all is drawn."""
        (down, across), sheet = self.labels, self.sheet
        axes = page(self.extent[0] + 2.0)
        self._fill(axes)
        if self.picture.hidden.any():
            _hatch(axes, self.picture.hidden)
        family = families("".join([*down.texts, *across.texts]))
        name(axes.yaxis, down, sheet.cell_height, family)
        name(axes.xaxis, across, sheet.cell_width, family, sheet.rotation)
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        self._rule(axes)
        head(axes, self.title, self.extent[0] + self.right)
        foot(axes, self.foot, self.below)
        return axes

    def fit(self, axes: Axes) -> Figure:
        """The figure of the drawn map, as large as it and all that was added to it."""
        return fit(axes, self.extent)

    def _fill(self, axes: Axes) -> None:
        """The cells and their colour bar; without a colouring, an empty table."""
        rows, columns = self.picture.values.shape
        aspect = self.sheet.cell_height / self.sheet.cell_width
        if self.colouring is None:
            axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), aspect=aspect)
            return
        image = axes.imshow(
            self.picture.values,
            cmap=self.colouring.map,
            norm=self.colouring.norm,
            aspect=aspect,
            interpolation="nearest",
        )
        width = _COLOUR_BAR / self.extent[0]
        add_bar(axes, image, self.colouring, (1 + width + self.right / self.extent[0], 0, width, 1))

    def _thinned(self) -> list[str]:
        """Which tokens are named, where not all are; among pooled ones the positions say it."""
        sides = zip(("row", "column"), (self.picture.down, self.picture.across), self.labels, strict=True)
        steps = {name: labels.step for name, side, labels in sides if labels.step > 1 and not side.pooled}
        if len(set(steps.values())) == 1 and len(steps) == 2:
            return [f"every {ordinal(steps['row'])} {self.noun} is named"]
        return [f"every {ordinal(step)} {name} is named" for name, step in steps.items()]

    def _rule(self, axes: Axes) -> None:
        """Thin lines between cells that are large enough."""
        rows, columns = self.picture.values.shape
        if self.colouring is None or self.sheet.cell_width == self.sheet.cell_height > SMALLEST_LABELLED_CELL:
            axes.set_xticks([number + 0.5 for number in range(columns - 1)], minor=True)
            axes.set_yticks([number + 0.5 for number in range(rows - 1)], minor=True)
            colour = "0.88" if self.colouring is None else "white"
            axes.grid(which="minor", color=colour, linewidth=1.5 * self.sheet.cell_width)
            axes.tick_params(which="minor", length=0, top=False)


def _hatch(axes: Axes, hidden: numpy.ndarray) -> None:
    """One patch over all cells without a pair."""
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
    """Left, top, right and bottom of boxes that cover the cells: the stretches of a row, while they stay the same."""
    done, growing = [], {}
    for row, cells in enumerate([*hidden, numpy.zeros(hidden.shape[1], bool)]):
        ends = numpy.flatnonzero(numpy.diff(cells, prepend=False, append=False)).tolist()
        stretches = set(zip(ends[::2], ends[1::2], strict=True))
        done += [(x0 - 0.5, growing.pop((x0, x1)) - 0.5, x1 - 0.5, row - 0.5) for x0, x1 in {*growing} - stretches]
        growing |= dict.fromkeys(stretches - growing.keys(), row)
    return done


def heatmap(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str | None = None,
    maximum: float | None = None,
    scale: Scale = "linear",
    mask: ArrayLike | Tensor | None = None,
    cells: Cells | None = None,
    unit: str = "weight",
) -> Figure:
    """A matplotlib figure of `weights` [R, C]: output tokens down the side, input tokens along the top.

    The weights are a tensor or array of any floating type, on any device. The colours go from 0 (or the least weight,
    if that is negative) to `maximum`, by default the greatest weight, on a scale that is "linear", "log" or "sqrt";
    the colour bar names the `unit`. Cells that are NaN or infinite are grey; pairs where `mask` [R, C] is False are
    hatched. Spaces are shown as ␣. From some 60 tokens on, only every second, third, ... token is named.

    Sides of more than 512 tokens are pooled, and the figure says how: to the largest weight of each cell, or as
    `cells` says. With `cells`, the weights may also be pooled already, such as a level of an atlas or what
    `regard.lenses.Pooled` shows; the tokens are always all of them.

    The figure is not one of pyplot's, and no global setting of matplotlib changes: `figure.savefig("attention.png")`
    or `regard.plots.save(figure, "attention.pdf")` writes it: one raster, everything else as lines and text.

    Raises:
        ShapeError: the weights are no matrix, or do not have a row and a column for each token, or for each cell.
        DtypeError: the mask is not bool.
        ConfigurationError: an unknown scale, one with no place for negative weights, or a maximum below the least.
        MissingExtra: matplotlib is not installed.

    >>> figure = heatmap([[0.9, 0.1], [0.2, 0.8]], ["das", "Haus"], ["the", "house"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['das', 'Haus']
    """
    shown = picture(weights, rows, columns, mask=mask, cells=cells)
    colouring = Colouring.of_weights(shown.values, scale, maximum, unit)
    drawn = Map(shown, colouring, title)
    return drawn.fit(drawn.draw())


def difference(
    first: ArrayLike | Tensor,
    second: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str | None = None,
    maximum: float | None = None,
    mask: ArrayLike | Tensor | None = None,
    cells: Cells | None = None,
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
    one, other = (picture(weights, rows, columns, mask=mask, cells=cells) for weights in (first, second))
    shown = replace(one, values=one.values - other.values)
    drawn = Map(shown, Colouring.of_differences(shown.values, maximum, unit), title)
    return drawn.fit(drawn.draw())
