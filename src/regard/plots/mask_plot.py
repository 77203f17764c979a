"""Plot the tiles of a mask: empty, partial or full."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from regard.errors import ShapeError, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# For EMPTY, PARTIAL and FULL: distinct in print and for colour-blind readers.
_COLOURS = ("#f1f1ee", "#8fb8de", "#1f4e79")

_SIDE, _NARROWEST = 5.2, 4.4  # inches
_CHARACTERS = 12  # of a title, in an inch
_MOST_OBLONG = 4.0
_MOST_LINES = 40  # a side of as many cells still has lines between them
_TICKS_ACROSS, _TICKS_DOWN = 1.6, 2.4  # in an inch


def tiles(
    verdicts: Tensor,
    size: int | tuple[int, ...],
    *,
    query_positions: Sequence[int],
    key_positions: Sequence[int],
    title: str | None = None,
    subtitle: str | None = None,
) -> Figure:
    """A matplotlib figure of a mask's tiles [R, C]: queries from top to bottom, keys from left to right.

    `verdicts` has 0 where no pair exists, 1 where some may, 2 where every pair does, as `mask.tiles` gives them; `size`
    is the rows and columns of a tile. The axes are labelled with positions, one for each query and each key.

    The figure is not registered with pyplot, and no global setting of matplotlib changes: `figure.savefig("mask.png")`
    writes it. `mask.draw(M, N).figure()` chooses the size of tiles.

    Raises:
        ShapeError: the tiles do not cover the queries and keys, or there are none.
        MissingExtra: matplotlib is not installed.

    >>> from regard import masks
    >>> figure = tiles(masks.causal().tiles(6, 6, 2), 2, query_positions=range(6), key_positions=range(6))
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('key position', 'query position')
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    queries, keys = len(query_positions), len(key_positions)
    if tuple(verdicts.shape) != (-(-queries // rows), -(-keys // columns)) or not verdicts.numel():
        raise ShapeError(
            f"verdicts has the shape {tuple(verdicts.shape)}; {queries} queries and {keys} keys in tiles of {rows} × "
            f"{columns} need {(-(-queries // rows), -(-keys // columns))}, and at least one"
        )
    wide, high = _axes_size(queries, keys)
    figure = require("matplotlib.figure", extra="plots").Figure(
        figsize=(max(wide + 1.0, _NARROWEST), high + 1.5), layout="compressed"
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    axes = figure.add_subplot()
    _fill(axes, verdicts, [*range(0, queries, rows), queries], [*range(0, keys, columns), keys])
    axes.set(xlim=(0, keys), ylim=(queries, 0), aspect=high * keys / (wide * queries))
    _name(axes.xaxis, "key position", key_positions, most=wide * _TICKS_ACROSS)
    _name(axes.yaxis, "query position", query_positions, most=high * _TICKS_DOWN)
    axes.tick_params(length=0, labelsize=9, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.spines[:].set_visible(False)
    _describe(figure, verdict_names((rows, columns)), title, subtitle)
    return figure


def _fill(axes: Axes, verdicts: Tensor, down: list[int], across: list[int]) -> None:
    """Colour each tile; `down` and `across` are the edges of tiles."""
    colours = require("matplotlib.colors", extra="plots")
    few = max(verdicts.shape) <= _MOST_LINES
    mesh = axes.pcolormesh(
        across,
        down,
        verdicts.cpu().numpy(),
        cmap=colours.ListedColormap(_COLOURS),
        vmin=-0.5,
        vmax=2.5,
        rasterized=not few,
    )
    if few:
        mesh.set(edgecolor="white", linewidth=1.0)


def verdict_names(size: tuple[int, ...]) -> tuple[str, str, str]:
    """The names of EMPTY, PARTIAL and FULL; for tiles of one pair, which are never PARTIAL, that name is empty.

    >>> verdict_names((4, 4)), verdict_names((1, 1))
    (('empty', 'partial', 'full'), ('does not exist', '', 'exists'))
    """
    return ("does not exist", "", "exists") if size == (1, 1) else ("empty", "partial", "full")


def _axes_size(queries: int, keys: int) -> tuple[float, float]:
    """Width and height of the axes in inches: to scale, up to a ratio of 4."""
    ratio = min(max(keys / queries, 1 / _MOST_OBLONG), _MOST_OBLONG)
    return _SIDE * min(1.0, ratio), _SIDE * min(1.0, 1 / ratio)


def _name(axis: Axis, label: str, positions: Sequence[int], most: float) -> None:
    step = 1 << (math.ceil(len(positions) / most) - 1).bit_length()
    indices = range(0, len(positions), step)
    axis.set_ticks([index + 0.5 for index in indices], labels=[f"{positions[index]:,}" for index in indices])
    axis.set_label_text(label, fontsize=9, color="0.35")


def _describe(figure: Figure, named: tuple[str, str, str], title: str | None, subtitle: str | None) -> None:
    patch = require("matplotlib.patches", extra="plots").Patch
    longest = int(figure.get_figwidth() * _CHARACTERS)
    if title:
        figure.suptitle(textwrap.fill(title, longest), fontsize=10.5, parse_math=False, usetex=False)
    kinds = [(colour, name) for colour, name in zip(_COLOURS, named, strict=True) if name]
    legend = figure.legend(
        handles=[patch(facecolor=colour, edgecolor="0.8", label=name) for colour, name in reversed(kinds)],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        handlelength=1.0,
        handleheight=1.0,
        title=textwrap.fill(subtitle or "", longest),
        title_fontsize=9,
    )
    legend.get_title().set(multialignment="center", color="0.35")
