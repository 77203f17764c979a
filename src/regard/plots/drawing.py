"""Attention weights drawn as a heat map, and the difference of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError
from regard.plots.cells import Cells, picture
from regard.plots.colours import Colouring, Scale
from regard.plots.labels import matrix
from regard.plots.maps import Map

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
