"""Plot the variants of a comparison: quality of each seed with its interval, training time, quality by length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.errors import ShapeError, require
from regard.plots.colours import HEADS
from regard.plots.figures import PLAIN
from regard.plots.labels import font_families, phrase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_ROW = 0.34
_PANEL = 3.4
_LEAST_HIGH = 2.2
_FRAME = 1.1

_STYLES = ("o-", "s--", "^-.", "D:", "v-", "P--", "X-.", "*:")


@dataclass(frozen=True)
class VariantPoints:
    """A variant: its quality with each seed, the interval, CPU seconds of training, and quality by source length."""

    name: str
    qualities: Sequence[float]
    interval: tuple[float, float] | None
    cpu_seconds: float
    by_length: Sequence[float] = ()


def draw_variants(variants: Sequence[VariantPoints], quality: str, title: str, lengths: Sequence[str] = ()) -> Figure:
    """A matplotlib figure of variants, from the top: a point for each seed, a bar for the interval, and the time.

    Args:
        variants: in the order of the table.
        quality: name of the measure.
        title: of the figure.
        lengths: names of the classes of `by_length`, which then has a panel; none without it.

    The figure is not registered with pyplot.

    Raises:
        ShapeError: no variants, or one whose `by_length` has another number of classes.
        MissingExtra: matplotlib is not installed.

    >>> points = [VariantPoints("dot", [1.0, 2.0], (0.5, 2.5), 3.0), VariantPoints("general", [2.0, 2.1], None, 4.0)]
    >>> [axes.get_xlabel() for axes in draw_variants(points, "BLEU", "scores").axes]
    ['BLEU', 'CPU seconds of training']
    """
    if not variants:
        raise ShapeError("there are no variants to draw; the figure needs one at least")
    for one in variants:
        if len(one.by_length) != len(lengths):
            raise ShapeError(
                f"{one.name} has {len(one.by_length)} classes of length, and there are {len(lengths)} names for them; "
                "it needs a quality for each"
            )
    panels = 3 if lengths else 2
    high = max(_LEAST_HIGH, _FRAME + _ROW * len(variants))
    figure = require("matplotlib.figure", extra="plots").Figure(figsize=(panels * _PANEL, high), layout="constrained")
    title = phrase(title, 150)
    figure.suptitle(title, fontsize=11, fontfamily=font_families(title), **PLAIN)
    axes = figure.subplots(1, panels, width_ratios=[1.25, 0.75, 1.0][:panels], squeeze=False)[0]
    _draw_qualities(axes[0], variants, quality)
    _draw_seconds(axes[1], variants)
    if lengths:
        _draw_lengths(axes[2], variants, quality, lengths)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(length=2, width=0.5, labelsize=8)
    return figure


def _draw_qualities(axes: Axes, variants: Sequence[VariantPoints], quality: str) -> None:
    """Points of seeds, and a bar of the interval with the mean, in a row for each variant."""
    for row, one in enumerate(variants):
        mean = sum(one.qualities) / len(one.qualities)
        if one.interval is not None:
            axes.plot(one.interval, (row, row), color=HEADS[0], linewidth=2, solid_capstyle="butt", alpha=0.5)
        axes.plot([mean], [row], "|", color=HEADS[0], markersize=12, markeredgewidth=2)
        axes.plot(one.qualities, [row] * len(one.qualities), "o", color=HEADS[1], markersize=4, alpha=0.8)
    names = [phrase(one.name, 40) for one in variants]
    axes.set(ylim=(len(variants) - 0.5, -0.5))
    axes.set_yticks(range(len(variants)), labels=names, fontfamily=font_families("".join(names)), **PLAIN)
    axes.set_xlabel(quality, fontsize=8, **PLAIN)
    axes.grid(axis="x", linewidth=0.4, alpha=0.5)


def _draw_seconds(axes: Axes, variants: Sequence[VariantPoints]) -> None:
    axes.barh(range(len(variants)), [one.cpu_seconds for one in variants], height=0.55, color=HEADS[2])
    axes.set(ylim=(len(variants) - 0.5, -0.5), yticks=[])
    axes.set_xlabel("CPU seconds of training", fontsize=8, **PLAIN)


def _draw_lengths(axes: Axes, variants: Sequence[VariantPoints], quality: str, lengths: Sequence[str]) -> None:
    for number, one in enumerate(variants):
        axes.plot(
            range(len(lengths)), one.by_length, _STYLES[number % len(_STYLES)], color=HEADS[number % len(HEADS)],
            markersize=4, linewidth=1.2, label=phrase(one.name, 40),
        )  # fmt: skip
    axes.set_xticks(range(len(lengths)), labels=list(lengths), **PLAIN)
    axes.set_xlabel("source tokens", fontsize=8, **PLAIN)
    axes.set_ylabel(quality, fontsize=8, **PLAIN)
    legend = axes.legend(fontsize=7, frameon=False)
    for text in legend.get_texts():
        text.set(**PLAIN)
