"""Plot word alignments: links, over their weights, against gold links."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, ShapeError, require
from regard.plots.colours import HEADS, ColourScale
from regard.plots.figures import NOTE, PLAIN
from regard.plots.heatmaps import Heatmap
from regard.plots.pooling import CellAxis, PooledWeights, check_tokens, checked_matrix, pool_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Link = tuple[int, int]
"""(source word, target word), counted from 0."""

_MOST_WORDS = 200
_MARK = 0.4  # of a cell
_INK, _WRONG = "black", HEADS[1]
_MARGIN = 0.2  # inches, for the signs of words without a link
_ENTRY = 1.9  # inches, of the legend
_POINTS = 72


class Gold(Protocol):
    """Gold links, such as `regard.heads.SentenceLinks`; sure links are possible, too."""

    @property
    def sure(self) -> Collection[Link]:
        """The sure links."""
        ...

    @property
    def possible(self) -> Collection[Link]:
        """The possible links."""
        ...


def alignment(
    links: Iterable[Link],
    source: Sequence[str],
    target: Sequence[str],
    *,
    weights: ArrayLike | Tensor | None = None,
    gold: Gold | None = None,
    error_rate: float | None = None,
    title: str | None = None,
) -> Figure:
    """A matplotlib figure of links between words: target words down the side, source words along the top.

    Links are discs, over the `weights` [target words, source words] they come from, if passed. With `gold`, sure links
    are squares, possible ones dashed squares, and a link that is neither is a cross. Words without a link are grey,
    with ∅ at the far end of their row or column. The caption has precision |A ∩ P| / |A| and recall
    |A ∩ S| / |S| of the links A, the sure S and the possible P with S part of P, and the `error_rate`, if passed,
    such as `regard.heads.alignment_error_rate([links], [gold.sure], [gold.possible])`.

    The weights are one raster image; everything else is lines and text. The figure is not registered with pyplot.

    Source: Och and Ney 2003, A Systematic Comparison of Various Statistical Alignment Models (on evaluation).

    Raises:
        ShapeError: words that are one text or none, or more than 200; a link of a word that is not there; weights that
            do not fit the words.
        ConfigurationError: links that are no pairs of whole numbers; gold without `sure` and `possible`; negative
            weights; an error rate that is not in 0..1.
        MissingExtra: matplotlib is not installed.

    >>> figure = alignment([(0, 0), (1, 1)], ["das", "Haus"], ["the", "house"])
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['the', 'house']
    """
    _check_words(source, target)
    found = _links("links", links, source, target)
    sure, possible = _gold(gold, source, target)
    if error_rate is not None and not 0 <= error_rate <= 1:
        raise ConfigurationError(f"error_rate is {error_rate}; it needs to be in 0..1, 0 where all is right")
    pooled, colouring = _weights(weights, source, target)
    notes = [] if gold is None else _caption(found, sure, possible, error_rate)
    plot = Heatmap(pooled, colouring, title, right=_MARGIN, below=_MARGIN + 0.05, notes=notes)
    axes = plot.draw()
    cell = min(plot.geometry.cell_width, plot.geometry.cell_height) * _POINTS
    handles = [
        *_boxes(axes, sure, cell, "sure link", dashed=False),
        *_boxes(axes, possible - sure, cell, "possible link", dashed=True),
        *_marks(axes, found if gold is None else found & possible, cell, "o", _INK, "link"),
        *_marks(axes, set() if gold is None else found - possible, cell, "X", _WRONG, "link that is not possible"),
    ]
    handles += _unlinked(axes, found, len(source), len(target))
    _legend(axes, handles, plot)
    return plot.fit(axes)


def _check_words(source: Sequence[str], target: Sequence[str]) -> None:
    check_tokens(source=source, target=target)
    for name, words in (("source", source), ("target", target)):
        if not 1 <= len(words) <= _MOST_WORDS:
            raise ShapeError(
                f"{name} has {len(words):,} words; an alignment needs at least one word on each side, and a page holds "
                f"{_MOST_WORDS} at most: draw longer texts as a heatmap"
            )


def _links(name: str, links: Iterable[Link], source: Sequence[str], target: Sequence[str]) -> set[Link]:
    found = set()
    for link in links:
        pair = tuple(link) if isinstance(link, Iterable) else ()
        if len(pair) != 2 or not all(hasattr(number, "__index__") for number in pair):
            raise ConfigurationError(f"{name} has {link!r}; a link is (source word, target word), counted from 0")
        found.add((int(pair[0]), int(pair[1])))
    for one, other in sorted(found):
        if not (0 <= one < len(source) and 0 <= other < len(target)):
            swapped = 0 <= other < len(source) and 0 <= one < len(target)
            raise ShapeError(
                f"{name} has {(one, other)}, but there are {len(source)} source words and {len(target)} target words, "
                f"counted from 0{': a link has its source word first' if swapped else ''}"
            )
    return found


def _gold(gold: Gold | None, source: Sequence[str], target: Sequence[str]) -> tuple[set[Link], set[Link]]:
    """The sure links, and the possible links including the sure ones."""
    if gold is None:
        return set(), set()
    if not (hasattr(gold, "sure") and hasattr(gold, "possible")):
        raise ConfigurationError(
            f"gold is a {type(gold).__name__}; it needs links as gold.sure and gold.possible, as "
            "regard.heads.SentenceLinks has them"
        )
    sure = _links("gold.sure", gold.sure, source, target)
    return sure, sure | _links("gold.possible", gold.possible, source, target)


def _weights(
    weights: ArrayLike | Tensor | None, source: Sequence[str], target: Sequence[str]
) -> tuple[PooledWeights, ColourScale | None]:
    if weights is None:
        empty = numpy.ma.zeros((len(target), len(source)))
        hidden, down, across = numpy.zeros(empty.shape, bool), CellAxis.uniform(target), CellAxis.uniform(source)
        return PooledWeights(empty, hidden, down, across, "max"), None
    pooled = pool_weights(checked_matrix(weights, target, source), target, source)
    if pooled.values.count() and float(pooled.values.min()) < 0:
        raise ConfigurationError(f"weights go down to {float(pooled.values.min()):.6g}; weights are not negative")
    return pooled, ColourScale.for_weights(pooled.values, "linear", None, "weight")


def _caption(found: set[Link], sure: set[Link], possible: set[Link], error_rate: float | None) -> list[str]:
    shares = (("precision", found & possible, found), ("recall", found & sure, sure))
    return [
        *([f"AER {error_rate:.1%}"] if error_rate is not None else []),
        *(
            f"{name} {len(right) / len(whole):.1%} ({len(right)} of {len(whole)})" if whole else f"no {name}: no links"
            for name, right, whole in shares
        ),
    ]


def _boxes(axes: Axes, links: set[Link], cell: float, label: str, *, dashed: bool) -> list[Any]:
    """Squares around cells, with a white border so that they stand out on light and dark."""
    if not links:
        return []
    rectangle = require("matplotlib.patches", extra="plots").Rectangle
    collection = require("matplotlib.collections", extra="plots").PatchCollection
    squares = [rectangle((source - 0.44, target - 0.44), 0.88, 0.88) for source, target in sorted(links)]
    thick = min(1.6, 0.07 * cell)
    style = {"facecolor": "none", "linestyle": (0, (3, 2)) if dashed else "solid"}
    axes.add_collection(collection(squares, facecolor="none", edgecolor="white", linewidth=2.2 * thick), autolim=False)
    axes.add_collection(collection(squares, edgecolor=_INK, linewidth=thick, label=label, **style), autolim=False)
    return [rectangle((0, 0), 1, 1, edgecolor=_INK, linewidth=1.4, label=label, **style)]


def _marks(axes: Axes, links: set[Link], cell: float, marker: str, colour: str, label: str) -> list[Any]:
    if not links:
        return []
    line = require("matplotlib.lines", extra="plots").Line2D
    across, down = zip(*sorted(links), strict=True)
    style = {"linestyle": "none", "marker": marker, "markerfacecolor": colour, "markeredgecolor": "white"}
    size = _MARK * cell
    axes.add_line(line(across, down, markersize=size, markeredgewidth=min(1.0, 0.1 * size), label=label, **style))
    return [line([], [], markersize=8, label=label, **style)]


def _unlinked(axes: Axes, found: set[Link], sources: int, targets: int) -> list[Any]:
    """Grey labels for words without a link, and ∅ at the other end of their row or column."""
    without = (
        (axes.xaxis, set(range(sources)) - {source for source, _ in found}),
        (axes.yaxis, set(range(targets)) - {target for _, target in found}),
    )
    for axis, words in without:
        for at, name in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True):
            if round(at) in words:
                name.set_color("0.55")
    small = {"fontsize": 8, "color": "0.35", "clip_on": False, **PLAIN}
    near = {"textcoords": "offset points", "annotation_clip": False}
    for word in sorted(without[0][1]):
        axes.annotate("∅", (word, targets - 0.5), (0, -3), ha="center", va="top", **near, **small)
    for word in sorted(without[1][1]):
        axes.annotate("∅", (sources - 0.5, word), (4, 0), ha="left", va="center", **near, **small)
    if not (without[0][1] or without[1][1]):
        return []
    line = require("matplotlib.lines", extra="plots").Line2D
    return [line([], [], linestyle="none", label="∅  word without a link")]


def _legend(axes: Axes, handles: list[Any], plot: Heatmap) -> None:
    """The legend below the notes, as wide as the heat map."""
    wide, high = plot.extent
    below = plot.below + 0.2 + NOTE * len(plot.note_lines)
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, -below / high),
        borderaxespad=0,
        borderpad=0,
        ncols=max(1, int(wide / _ENTRY)),
        frameon=False,
        fontsize=8,
        handlelength=1.2,
    )
