"""Plot weights as lines between two columns of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, ShapeError, require
from regard.plots.colours import HEADS, colour_maximum, format_number
from regard.plots.figures import (
    NOTE,
    PLAIN,
    draw_notes,
    draw_title,
    fit_figure,
    font_size,
    new_axes,
    ordinal,
    text_width,
    wrap_notes,
)
from regard.plots.labels import font_families, phrase, token_label
from regard.plots.pooling import check_tokens, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches.
_ROW, _CLOSEST = 0.24, 0.15
_LONGEST_SIDE = 10.0
_GAP = 2.6

_STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 3)), (0, (1, 2.5)), (0, (9, 2)))
_MOST_LINES = 20_000
_FAINTEST = 1 / 255  # of full opacity: less is invisible


def lines(
    weights: ArrayLike | Tensor,
    query_tokens: Sequence[str],
    key_tokens: Sequence[str],
    *,
    heads: Sequence[str] | None = None,
    threshold: float = 0.0,
    top: int | None = None,
    maximum: float | None = None,
    title: str | None = None,
) -> Figure:
    """A matplotlib figure of lines from queries, on the left, to keys, on the right; the darker, the more weight.

    `weights` is [M, N], or [heads, M, N] for up to 7 heads: each then has a colour and a dash pattern, and its name
    of `heads` in a legend. The opacity of a line is its weight divided by `maximum`, by default the greatest weight of
    all. Lines are drawn for weights of at least `threshold`, and with `top` only for the `top` largest weights of each
    query in each head; the figure notes what is left out. Weights that are NaN or infinite have no line, and are
    counted.

    Everything is lines and text, without a raster image. The figure is not registered with pyplot.

    Raises:
        ShapeError: the weights are not [M, N] or [heads, M, N], are empty, or do not fit the tokens or the names.
        ConfigurationError: negative weights; more heads than colours; a threshold, `top` or maximum out of its
            range; more than 20,000 lines.
        MissingExtra: matplotlib is not installed.

    >>> figure = lines([[0.9, 0.1], [0.2, 0.8]], ["das", "Haus"], ["the", "house"], threshold=0.15)
    >>> len(figure.axes[0].collections[0].get_segments())
    3
    """
    values = _checked(weights, query_tokens, key_tokens, heads)
    _check_settings(threshold, top, maximum)
    finite = numpy.ma.masked_invalid(values)
    if finite.count() and float(finite.min()) < 0:
        raise ConfigurationError(
            f"weights go down to {float(finite.min()):.6g}; lines are for weights, which are not negative: "
            "draw scores as a heatmap"
        )
    full = colour_maximum(finite) if maximum is None else maximum
    drawn = _with_lines(finite.filled(0.0), threshold, top, full)
    if drawn.sum() > _MOST_LINES:
        raise ConfigurationError(
            f"there are {int(drawn.sum()):,} lines, and {_MOST_LINES:,} at most can be drawn: give top=1, a threshold, "
            "or a window of the weights and tokens"
        )
    names = [phrase(str(name)) for name in heads] if heads else [f"head {number}" for number in range(len(values))]
    drawing = _LineDrawing(finite.filled(0.0), drawn, full, names if heads or len(values) > 1 else [])
    notes = _notes(threshold, top, full, drawn, finite)
    return drawing.draw(_TokenColumn.from_tokens(query_tokens), _TokenColumn.from_tokens(key_tokens), notes, title)


@dataclass(frozen=True)
class _TokenColumn:
    """The tokens of one side; every `step`-th is labelled."""

    count: int
    step: int
    texts: list[str]

    @classmethod
    def from_tokens(cls, tokens: Sequence[str]) -> _TokenColumn:
        step = math.ceil(len(tokens) * _CLOSEST / _LONGEST_SIDE)
        return cls(len(tokens), step, [token_label(token) for token in tokens[::step]])

    @property
    def height(self) -> float:
        """The height in inches."""
        return min(_ROW * self.count, _LONGEST_SIDE)

    def heights(self, numbers: numpy.ndarray) -> numpy.ndarray:
        """The places of tokens from the top, as fractions of the height, which is the same on both sides."""
        return (numbers + 0.5) / self.count


@dataclass(frozen=True)
class _LineDrawing:
    """The weights [heads, M, N], which of them have lines, the weight with full opacity, and the names of heads."""

    weights: numpy.ndarray
    drawn: numpy.ndarray
    full: float
    names: list[str]

    def draw(self, left: _TokenColumn, right: _TokenColumn, notes: list[str], title: str | None) -> Figure:
        high = max(left.height, right.height)
        thinned = {column.step for column in (left, right) if column.step > 1}
        notes = [*notes, *(f"every {ordinal(step)} token is named" for step in sorted(thinned))]
        note_lines = wrap_notes(notes, _GAP)
        axes = new_axes(_GAP + 2.0)
        axes.set(xlim=(0, 1), ylim=(1, 0), xticks=[])
        axes.spines[:].set_visible(False)
        other = axes.secondary_yaxis("right")
        other.spines[:].set_visible(False)
        family = font_families("".join([*left.texts, *right.texts]))
        for axis, column in ((axes.yaxis, left), (other.yaxis, right)):
            at = column.heights(numpy.arange(0, column.count, column.step)).tolist()
            size = font_size(high / column.count if column.step == 1 else _CLOSEST)
            axis.set_ticks(at, labels=column.texts, fontsize=min(size, 10), fontfamily=family, **PLAIN)
            axis.set_tick_params(length=0 if column.step == 1 else 2, width=0.5)
        for number in range(len(self.weights)):
            self._add(axes, number, left, right)
        draw_title(axes, title, _GAP)
        draw_notes(axes, note_lines)
        self._name(axes, below=(0.2 + NOTE * len(note_lines)) / high)
        return fit_figure(axes, (_GAP, high))

    def _add(self, axes: Axes, number: int, left: _TokenColumn, right: _TokenColumn) -> None:
        """Add the lines of one head, the faintest first; the ends of heads are offset from each other."""
        queries, keys = self.drawn[number].nonzero()
        weights = self.weights[number, queries, keys]
        order = numpy.argsort(weights, kind="stable")
        offset = 0.5 * ((number + 0.5) / len(self.weights) - 0.5)
        starts, ends = left.heights(queries[order] + offset), right.heights(keys[order] + offset)
        collections = require("matplotlib.collections", extra="plots")
        colour = require("matplotlib.colors", extra="plots").to_rgb(HEADS[number])
        opaque = numpy.minimum(weights[order] / self.full, 1.0)
        drawn = collections.LineCollection(
            [[(0.0, start), (1.0, end)] for start, end in zip(starts, ends, strict=True)],
            colors=[(*colour, float(part)) for part in opaque],
            linewidths=1.6,
            linestyles=_STYLES[number] if self.names else "solid",
            capstyle="butt",
        )
        axes.add_collection(drawn, autolim=False)

    def _name(self, axes: Axes, below: float) -> None:
        """Add the legend of heads, `below` times the height under the lines."""
        if not self.names:
            return
        line = require("matplotlib.lines", extra="plots").Line2D
        handles = [
            line([], [], color=HEADS[number], linestyle=_STYLES[number], linewidth=1.6, label=text)
            for number, text in enumerate(self.names)
        ]
        legend = axes.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, -below),
            borderaxespad=0,
            borderpad=0,
            ncols=max(1, int((_GAP + 0.6) / (0.65 + 0.12 * max(map(text_width, self.names))))),
            frameon=False,
            handlelength=3.2,
            prop={"family": font_families("".join(self.names)), "size": 8.5},
        )
        for text in legend.get_texts():
            text.set(**PLAIN)


def _with_lines(weights: numpy.ndarray, threshold: float, top: int | None, full: float) -> numpy.ndarray:
    """Which weights [heads, M, N] have a line; of equal weights the first keys."""
    drawn = (weights >= threshold) & (weights >= full * _FAINTEST)
    if top is not None and top < weights.shape[-1]:
        largest = numpy.argsort(-weights, axis=-1, kind="stable")[..., :top]
        among = numpy.zeros_like(drawn)
        numpy.put_along_axis(among, largest, values=True, axis=-1)
        drawn &= among
    return drawn


def _notes(
    threshold: float, top: int | None, full: float, drawn: numpy.ndarray, finite: numpy.ma.MaskedArray
) -> list[str]:
    broken = finite.size - finite.count()
    part = finite.filled(0.0)[drawn].sum() / max(float(finite.filled(0.0).sum()), 1e-300)
    return [
        f"full colour: {format_number(float(f'{full:.3g}'))}",
        *([f"the {top} largest of each query" if top > 1 else "the largest of each query"] if top else []),
        *([f"weights of at least {format_number(threshold)}"] if threshold else []),
        *([f"lines have {part:.0%} of all weight"] if top or threshold else []),
        *([f"without a line: {broken:,} NaN or infinite"] if broken else []),
    ]


def _checked(
    weights: ArrayLike | Tensor, query_tokens: Sequence[str], key_tokens: Sequence[str], heads: Sequence[str] | None
) -> numpy.ndarray:
    """The weights as an array [heads, M, N], after checks."""
    check_tokens(query_tokens=query_tokens, key_tokens=key_tokens, heads=heads or ())
    values = numbers(weights).to(torch.float64)
    if values.ndim not in (2, 3) or not values.numel():
        raise ShapeError(
            f"weights is {list(values.shape)}; it needs to be [queries, keys] or [heads, queries, keys], with at least "
            "one of each: choose one sentence, for instance weights[0]"
        )
    values = values.reshape(-1, *values.shape[-2:])
    if values.shape[1:] != (len(query_tokens), len(key_tokens)):
        raise ShapeError(
            f"weights is {values.shape[1]} × {values.shape[2]}, but there are {len(query_tokens)} query tokens and "
            f"{len(key_tokens)} key tokens; it needs a row for each query and a column for each key"
        )
    if len(values) > len(HEADS):
        raise ConfigurationError(
            f"weights has {len(values)} heads, and {len(HEADS)} at most can be told apart by colour: choose some, for "
            f"instance weights[:{len(HEADS)}], or take their mean"
        )
    if heads is not None and len(heads) != len(values):
        raise ShapeError(f"heads has {len(heads)} names and weights has {len(values)} heads; each needs one name")
    return values.numpy()


def _check_settings(threshold: float, top: int | None, maximum: float | None) -> None:
    if not 0 <= threshold < math.inf:
        raise ConfigurationError(f"threshold is {threshold}; it needs to be a number of at least 0")
    if top is not None and (not isinstance(top, int) or isinstance(top, bool) or top < 1):
        raise ConfigurationError(f"top is {top!r}; it needs to be a whole number of at least 1, or None for all")
    if maximum is not None and not 0 < maximum < math.inf:
        raise ConfigurationError(f"maximum is {maximum}; it needs to be a finite number above 0")
