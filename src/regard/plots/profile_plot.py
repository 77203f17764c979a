"""Plot a heat map with the entropy of its rows and the column sums beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError
from regard.plots.colours import HEADS, ColourScale, Scale, format_number
from regard.plots.figures import PLAIN
from regard.plots.heatmaps import Heatmap
from regard.plots.pooling import CellAxis, Pooling, numbers, pool_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
