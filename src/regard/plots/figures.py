"""The layout of figures: cell sizes, axis labels, titles and notes; and saving figures to files."""

from __future__ import annotations

import logging
import math
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import ConfigurationError, require
from regard.plots.labels import font_families, phrase, token_label
from regard.plots.pooling import CellAxis
from regard.utils.atomic_files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Inches.
_LARGEST_CELL = 0.45
SMALLEST_LABELLED_CELL = 0.15
_USUAL_SIDE = 7.0
_LONGEST_SIDE = 10.0
_MARGIN = 0.08
NOTE = 0.16  # a line
_CHARACTER = 0.09  # of a title

POINTS = 72  # of an inch
_NOTE_CHARACTERS = 15  # in an inch
_LEAST_CHARACTERS, _MOST_CHARACTERS = 32, 400  # of a line of a title, and before it is folded
_MOST_POSITIONS = 20

PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""Arguments of every text, so that a token with "$" is not parsed as a formula."""


@dataclass(frozen=True)
class AxisLabels:
    """The tick labels along `count` cells: texts, their places in cells, and the step between labelled tokens."""

    texts: list[str]
    places: list[float]
    count: int
    step: int = 1

    @classmethod
    def for_axis(cls, side: CellAxis, show: Callable[[str], str] = token_label) -> AxisLabels:
        """Labels for as many tokens as there is room for, by `show`; with positions where cells have several tokens.

        >>> from regard.plots.pooling import CellAxis
        >>> AxisLabels.for_axis(CellAxis.uniform(["the"] * 20_000, 40)).texts[:3]
        ['0 the', '1,000 the', '2,000 the']
        """
        step = math.ceil(SMALLEST_LABELLED_CELL / cell_size(side.cells) - 1e-9)
        if side.pooled:
            step = _round_step(len(side.tokens), min(_MOST_POSITIONS, max(1, side.cells // step)))
        named = range(0, len(side.tokens), step)
        texts = [show(side.tokens[number]) for number in named]
        if side.pooled:
            texts = [f"{number:,} {text}" for number, text in zip(named, texts, strict=True)]
        return cls(texts, [side.place(number) for number in named], side.cells, step)

    @property
    def width(self) -> float:
        """The width of the widest label, in units of the font size."""
        return max(map(text_width, self.texts))

    @property
    def spacing(self) -> float:
        """The distance between two labels, in cells."""
        return self.places[1] - self.places[0] if len(self.places) > 1 else self.count


@dataclass(frozen=True)
class CellGeometry:
    """The size of a cell in inches, and the rotation of the column labels: 0, 45 or 90 degrees."""

    cell_width: float
    cell_height: float
    rotation: int

    @classmethod
    def for_labels(cls, down: AxisLabels, across: AxisLabels) -> CellGeometry:
        """Square cells, as large as the longer side allows; oblong only where one side is too long for labels."""
        width, height = cell_size(across.count), cell_size(down.count)
        if min(width, height) >= SMALLEST_LABELLED_CELL:
            width = height = min(width, height)
        else:
            width, height = min(width, SMALLEST_LABELLED_CELL), min(height, SMALLEST_LABELLED_CELL)
        room = across.spacing * width
        upright = across.width * font_size(width) / POINTS <= 0.92 * room
        return cls(width, height, rotation=0 if upright else 45 if room >= 0.25 else 90)

    @property
    def square(self) -> bool:
        """Whether cells are square, with room for a label each."""
        return self.cell_width == self.cell_height >= SMALLEST_LABELLED_CELL


def cell_size(count: int) -> float:
    """The size in inches of one of `count` cells in a row."""
    comfortable = min(_LARGEST_CELL, max(SMALLEST_LABELLED_CELL, _USUAL_SIDE / count))
    return min(comfortable, _LONGEST_SIDE / count)


def font_size(cell: float) -> float:
    """The font size of labels in points, for cells of that size in inches."""
    return min(11.0, max(7.0, 0.66 * cell * POINTS))


def text_width(text: str) -> float:
    """The approximate width of a text, in units of the font size."""
    return sum(1.0 if unicodedata.east_asian_width(character) in "WF" else 0.62 for character in text)


def new_axes(width: float) -> Axes:
    """Axes of a new figure without a window, about `width` inches wide; `fit_figure` sets the final size."""
    return require("matplotlib.figure", extra="plots").Figure(figsize=(width, width)).add_subplot()


def fit_figure(axes: Axes, size: tuple[float, float]) -> Figure:
    """Set the axes to `size` inches, and crop the figure to them and their texts."""
    figure: Any = axes.figure
    wide, high = figure.get_size_inches()
    axes.set_position((0, 0, size[0] / wide, size[1] / high))
    drawn: Any = axes.get_tightbbox()
    box = drawn.transformed(figure.dpi_scale_trans.inverted())
    wide, high = box.width + 2 * _MARGIN, box.height + 2 * _MARGIN
    figure.set_size_inches(wide, high)
    axes.set_position(((_MARGIN - box.x0) / wide, (_MARGIN - box.y0) / high, size[0] / wide, size[1] / high))
    return figure


def wrap_notes(notes: Sequence[str], width: float) -> list[str]:
    """The notes as lines of at most `width` inches."""
    return textwrap.wrap("; ".join(notes), max(24, int(width * _NOTE_CHARACTERS)))


def label_axis(axis: Axis, labels: AxisLabels, cell: float, family: list[str], rotation: int = 0) -> None:
    """Set the tick labels of an axis, with tick lines where not every cell is labelled."""
    slant = {"rotation": rotation, "rotation_mode": "anchor", "ha": "left", "va": "center"} if rotation else {}
    axis.set_ticks(labels.places, labels=labels.texts, fontsize=font_size(cell), fontfamily=family, **PLAIN, **slant)
    axis.set_tick_params(length=0 if labels.step == 1 else 2, width=0.5)


def draw_title(axes: Axes, title: str | None, width: float, above: float = 0.0) -> None:
    """Set the title, in lines of about `width` inches, `above` points above the labels."""
    if title:
        longest = max(_LEAST_CHARACTERS, int(width / _CHARACTER))
        lines = (phrase(line, _MOST_CHARACTERS) for line in title.splitlines())
        text = "\n".join(textwrap.fill(line, longest) if len(line) > longest else line for line in lines)
        axes.set_title(text, fontfamily=font_families(text), fontsize=12, pad=6 + above, **PLAIN)


def draw_notes(axes: Axes, lines: Sequence[str], below: float = 0.0) -> None:
    """Write notes at the left edge of the axes, `below` inches below them."""
    if lines:
        axes.xaxis.set_label_position("bottom")
        axes.set_xlabel("\n".join(lines), fontsize=8, color="0.35", loc="left", labelpad=4 + below * POINTS)
        axes.xaxis.label.set(ha="left", linespacing=1.25, fontfamily=font_families("".join(lines)), **PLAIN)


def ordinal(number: int) -> str:
    """An ordinal number.

    >>> ordinal(2), ordinal(11), ordinal(1003)
    ('2nd', '11th', '1,003rd')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number:,}{ending}"


def _round_step(length: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, ... that divides the length into at most `most` steps."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if -(-length // (power * factor)) <= most:
                return power * factor
        power *= 10


_FORMATS = (".png", ".svg", ".pdf")

# Text stays text instead of outlines; in PDF with embedded TrueType fonts, which publishers ask for. Without a date and
# with fixed ids the same figure gives the same file.
_SETTINGS = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "regard"}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save(figure: Figure, path: str | Path, *, dpi: float = 300) -> None:
    """Save a figure as PNG, SVG or PDF, by the ending of `path`; an existing file is replaced atomically.

    In SVG and PDF the weights are one raster image of `dpi` dots per inch, and everything else is lines and text. An
    SVG refers to its fonts by name. matplotlib's settings do not change.

    Raises:
        ConfigurationError: another ending; `dpi` that is not above 0.
        CheckpointError: the file cannot be written: a missing folder, a full or read-only disk.

    >>> from regard.plots import heatmap
    >>> save(heatmap([[1.0]], ["das"], ["the"]), "map.gif")
    Traceback (most recent call last):
    regard.errors.ConfigurationError: map.gif ends in '.gif'; a figure is written as .png, .svg or .pdf
    """
    ending = Path(path).suffix.lower()
    if ending not in _FORMATS:
        raise ConfigurationError(f"{path} ends in {ending!r}; a figure is written as .png, .svg or .pdf")
    if not dpi > 0:
        raise ConfigurationError(f"dpi is {dpi}; it needs to be above 0, such as 300 for print")
    # For a PDF fontTools warns of each table that it drops from a font.
    fonts = logging.getLogger("fontTools.subset")
    fonts.addFilter(_is_error)
    try:
        with require("matplotlib", extra="plots").rc_context(_SETTINGS), atomic_write(path) as partial:
            figure.savefig(partial, format=ending[1:], dpi=dpi, metadata=_NO_DATE.get(ending))
    finally:
        fonts.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
