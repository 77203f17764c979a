"""Plot the errors of an approximation of attention, its weights beside the exact ones, and the times of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from regard.errors import require
from regard.plots.colours import HEADS, ColourScale, add_colour_bar
from regard.plots.figures import PLAIN
from regard.plots.labels import font_families, phrase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_PANEL = 3.1
_HIGH = 2.4
_TITLE = 0.45

_EXACT, _APPROXIMATE = HEADS[0], HEADS[1]
_MOST_POINTS = 128  # of a line
_MOST_NAMES = 16
_SMALL: dict[str, Any] = {"fontsize": 8, "color": "0.35", **PLAIN}

Maps = tuple[numpy.ndarray, numpy.ndarray]
Times = tuple[Sequence[int], Sequence[float], Sequence[float]]


def draw(
    title: str,
    *,
    draws: numpy.ndarray,
    rows: numpy.ndarray,
    worst: int,
    maps: Maps | None,
    timings: Times,
    crossover: float | None,
    names: Sequence[str],
) -> Figure:
    """A matplotlib figure of an approximation: errors of heads and of rows, times, and pooled weights of a head.

    Args:
        title: the method.
        draws: the relative error of each head in each draw of random numbers, (draws, heads).
        rows: the error of each row, (heads, M).
        worst: the head whose rows and weights are drawn by themselves.
        maps: exact and approximate weights of that head, pooled to the same cells; None for none.
        timings: lengths, seconds of the exact and of the approximate attention.
        crossover: the length from which the approximation is faster, None for none.
        names: of the heads.

    The figure is not registered with pyplot.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    lines = 1 if maps is None else 2
    figure = require("matplotlib.figure", extra="plots").Figure(
        figsize=(3 * _PANEL, lines * _HIGH + _TITLE), layout="constrained"
    )
    title = phrase(title, 150)
    figure.suptitle(title, fontsize=11, fontfamily=font_families(title), **PLAIN)
    panels = figure.subplots(lines, 3, squeeze=False)
    _draw_heads(panels[0, 0], draws, worst, names)
    _draw_rows(panels[0, 1], rows, worst, names[worst])
    _draw_times(panels[0, 2], timings, crossover)
    if maps is not None:
        _draw_maps(panels[1], maps, names[worst])
    for axes in panels[0]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=2, width=0.5, labelsize=7)
    return figure


def _draw_heads(axes: Axes, draws: numpy.ndarray, worst: int, names: Sequence[str]) -> None:
    """A point for each head, with a bar of the standard deviation from draw to draw."""
    means, places = draws.mean(0), numpy.arange(draws.shape[1])
    spread = draws.std(0, ddof=1) if len(draws) > 1 else None
    axes.errorbar(places, means, spread, fmt="o", markersize=3.5, linewidth=1, color=_EXACT)
    axes.errorbar(
        places[worst : worst + 1],
        means[worst : worst + 1],
        None if spread is None else spread[worst : worst + 1],
        fmt="o",
        markersize=5,
        linewidth=1,
        color=_APPROXIMATE,
    )
    step = -(-len(names) // _MOST_NAMES)
    axes.set_xticks(places[::step], labels=[str(place) for place in places[::step]])
    axes.set_ylim(0, None)
    label = "head" if names[-1].startswith("head") else f"head, from {names[0]} on"
    axes.set_xlabel(label, **_SMALL)
    axes.set_ylabel("relative error of the output", **_SMALL)
    note = f"mean and standard deviation of {len(draws)} draws" if len(draws) > 1 else "one measurement"
    axes.set_title(note, loc="left", **_SMALL)


def _draw_rows(axes: Axes, rows: numpy.ndarray, worst: int, name: str) -> None:
    """The errors along the sequence: the median of the heads in a band from least to greatest, and the worst head."""
    heads, count = rows.shape
    edges = numpy.linspace(0, count, min(count, _MOST_POINTS) + 1).astype(int)
    starts, middles = edges[:-1], (edges[:-1] + edges[1:] - 1) / 2
    pooled = numpy.add.reduceat(rows, starts, axis=1) / numpy.diff(edges)
    if heads > 1:
        axes.fill_between(middles, pooled.min(0), pooled.max(0), color=_EXACT, alpha=0.2, linewidth=0)
        axes.plot(middles, numpy.median(pooled, 0), color=_EXACT, linewidth=1, label="median of the heads")
    axes.plot(middles, pooled[worst], color=_APPROXIMATE, linewidth=0.8, label=name)
    axes.set_ylim(0, None)
    axes.set_xlabel("query", **_SMALL)
    axes.set_ylabel("relative error of the row", **_SMALL)
    note = "all heads" if count <= _MOST_POINTS else f"means of {count / _MOST_POINTS:.3g} rows"
    axes.set_title(note, loc="left", **_SMALL)
    axes.legend(frameon=False, fontsize=7)


def _draw_times(axes: Axes, timings: Times, crossover: float | None) -> None:
    """Milliseconds against the length, both on logarithmic scales, and the crossover."""
    lengths, exact, approximate = timings
    for seconds, colour, label in ((exact, _EXACT, "exact"), (approximate, _APPROXIMATE, "approximate")):
        axes.plot(lengths, [1e3 * one for one in seconds], "o-", markersize=3, linewidth=1, color=colour, label=label)
    axes.set(xscale="log", yscale="log")
    ticker = require("matplotlib.ticker", extra="plots")
    axes.set_xticks(list(lengths)[:: -(-len(lengths) // 5)])
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("keys", **_SMALL)
    axes.set_ylabel("milliseconds", **_SMALL)
    note = "not faster at the longest" if crossover is None else f"faster from {crossover:,.0f} keys on"
    if crossover is not None:
        axes.axvline(crossover, color="0.6", linewidth=0.8, linestyle=(0, (3, 3)))
    axes.set_title(note, loc="left", **_SMALL)
    axes.legend(frameon=False, fontsize=7)


def _draw_maps(panels: Sequence[Axes], maps: Maps, name: str) -> None:
    """Exact and approximate weights on one scale, and their difference."""
    difference = maps[1] - maps[0]
    both = numpy.ma.masked_invalid(numpy.stack(maps))
    scale = "sqrt" if both.count() and float(both.min()) >= 0 else "linear"
    weights = ColourScale.for_weights(both, scale, None, "mean weight of a cell")
    signed = ColourScale.for_differences(numpy.ma.masked_invalid(difference), None, "approximate - exact")
    titles = f"{name}: exact weights", "approximate weights", "difference"
    for axes, cells, colouring, title in zip(
        panels, (*maps, difference), (weights, weights, signed), titles, strict=True
    ):
        image = axes.imshow(cells, cmap=colouring.map, norm=colouring.norm, interpolation="nearest", aspect="auto")
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel("keys", **_SMALL)
        axes.set_ylabel("queries", **_SMALL)
        axes.set_title(title, loc="left", **_SMALL)
        if colouring is not weights or axes is panels[1]:
            add_colour_bar(axes, image, colouring, (1.03, 0, 0.04, 1))
            axes.child_axes[-1].yaxis.set_major_locator(require("matplotlib.ticker", extra="plots").MaxNLocator(4))
