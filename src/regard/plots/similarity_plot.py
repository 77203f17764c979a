"""Plot the similarity matrix of heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, ShapeError
from regard.plots.colours import ColourScale
from regard.plots.figures import PLAIN, text_width
from regard.plots.heatmaps import Heatmap
from regard.plots.labels import font_families, phrase
from regard.plots.pooling import CellAxis, check_tokens, numbers, pool_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 8  # points
_POINTS = 72
_CLOSEST = 0.12  # inches between names of groups


def similarity(
    matrix: ArrayLike | Tensor,
    names: Sequence[str],
    *,
    order: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    maximum: float | None = None,
    unit: str = "similarity",
    title: str | None = None,
) -> Figure:
    """A matplotlib figure of the similarity of heads, `matrix` [H, H], in a chosen order.

    `order` has each of 0..H-1 once: the head drawn first, second, and so on. `groups` has the group of each head, such
    as its layer or cluster, in the order of `names`: lines separate neighbours of different groups, and each run
    of a group is labelled at its right. The colours go from 0 to `maximum`, by default the greatest entry; with
    negative entries, from white at 0 to blue below and red above.

    Raises:
        ShapeError: a matrix that is not square with a row for each name; groups that are not one for each name.
        ConfigurationError: an order that does not have every head once; a maximum that is too small.
        MissingExtra: matplotlib is not installed.

    >>> figure = similarity([[1.0, 0.25], [0.25, 1.0]], ["0.0", "0.1"], order=[1, 0])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['0.1', '0.0']
    """
    check_tokens(names=names, groups=groups or ())
    values = _square(matrix, names)
    order = range(len(names)) if order is None else [*order]
    if sorted(order) != [*range(len(names))]:
        raise ConfigurationError(
            f"order has {len(order)} entries and {len(set(order))} of them differ; it needs each of the {len(names)} "
            f"heads once, as numbers from 0 to {len(names) - 1}"
        )
    if groups is not None and len(groups) != len(names):
        raise ShapeError(f"groups has {len(groups)} entries and names has {len(names)}; each head needs its group")
    names = [names[number] for number in order]
    cells = pool_weights(values[list(order)][:, list(order)], names, names)
    if cells.values.count() and float(cells.values.min()) < 0:
        colouring = ColourScale.for_differences(cells.values, maximum, unit)
    else:
        colouring = ColourScale.for_weights(cells.values, "linear", maximum, unit)
    if groups is None:
        plot = Heatmap(cells, colouring, title, noun="head")
        return plot.fit(plot.draw())
    runs = _group_runs([str(groups[number]) for number in order])
    room = max(text_width(name) for name, _, _ in runs) * _TEXT / _POINTS + 0.15
    plot = Heatmap(cells, colouring, title, right=room, noun="head")
    axes = plot.draw()
    _draw_groups(axes, cells.down, runs, plot.geometry.cell_height)
    return plot.fit(axes)


def _square(matrix: ArrayLike | Tensor, names: Sequence[str]) -> Tensor:
    values = numbers(matrix, "matrix")
    if values.shape != (len(names), len(names)) or not len(names):
        raise ShapeError(
            f"matrix is {list(values.shape)}, but there are {len(names)} names; it needs a row and a column for each "
            "head, and at least one head"
        )
    return values


def _group_runs(groups: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each run of one group: its name, start and end."""
    runs, start = [], 0
    for name, members in groupby(groups):
        end = start + len([*members])
        runs.append((phrase(name), start, end))
        start = end
    return runs


def _draw_groups(axes: Axes, side: CellAxis, runs: list[tuple[str, int, int]], cell: float) -> None:
    """Draw lines between groups, black on white so that they stand out on every colour, and the names at the right."""
    family = font_families("".join(name for name, _, _ in runs))
    last, free = side.cells - 0.5, float("-inf")
    for name, start, end in runs:
        top, bottom = side.place(start - 0.5), side.place(end - 0.5)
        if start:
            for colour, thick in (("white", 2.2), ("black", 0.8)):
                axes.plot([-0.5, last], [top, top], color=colour, linewidth=thick, solid_capstyle="butt")
                axes.plot([top, top], [-0.5, last], color=colour, linewidth=thick, solid_capstyle="butt")
        middle = (top + bottom) / 2
        if (middle - free) * cell < _CLOSEST:
            continue  # no room for the name; the lines separate the group
        free = middle
        axes.annotate(
            name,
            (last, middle),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=_TEXT,
            fontfamily=family,
            annotation_clip=False,
            **PLAIN,
        )
    axes.set(xlim=(-0.5, last), ylim=(last, -0.5))
