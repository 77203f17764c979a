"""How large the parts of a picture are, and which of its tokens are named.

Figures as files, with their text as text.
"""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard.errors import require
from regard.plots.labels import families, phrase, shown
from regard.plots.pooling import Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


import logging
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Inches.
_LARGEST_CELL = 0.45
SMALLEST_LABELLED_CELL = 0.15
_USUAL_SIDE = 7.0
_LONGEST_SIDE = 10.0
_MARGIN = 0.08
NOTE = 0.16  # a line
_CHARACTER = 0.09  # of a title

_POINTS = 72
_NOTE_CHARACTERS = 15  # in an inch
_LEAST_CHARACTERS, _MOST_CHARACTERS = 32, 400  # of a line of a title, and before it is folded
_MOST_POSITIONS = 20

PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""For every text: a token "$" is no formula."""


@dataclass(frozen=True)
class Labels:
    """The names along one side of `count` cells: what is named, where, and every how many tokens."""

    texts: list[str]
    at: list[float]
    count: int
    step: int = 1

    @classmethod
    def of(cls, side: Side, show: Callable[[str], str] = shown) -> Labels:
        """As many tokens as there is room for, made visible by `show`; where a cell has several, with their positions.

        >>> from regard.plots.pooling import Side
        >>> Labels.of(Side.of(["the"] * 20_000, 40)).texts[:3]
        ['0 the', '1,000 the', '2,000 the']
        """
        step = math.ceil(SMALLEST_LABELLED_CELL / cell_size(side.cells) - 1e-9)
        if side.pooled:
            step = _round_step(len(side.tokens), min(_MOST_POSITIONS, max(1, side.cells // step)))
        named = range(0, len(side.tokens), step)
        texts = [show(side.tokens[number]) for number in named]
        if side.pooled:
            texts = [f"{number:,} {text}" for number, text in zip(named, texts, strict=True)]
        return cls(texts, [side.at(number) for number in named], side.cells, step)

    @property
    def width(self) -> float:
        """Of the widest, in units of the font size."""
        return max(map(text_width, self.texts))

    @property
    def spacing(self) -> float:
        """Between one name and the next, in cells."""
        return self.at[1] - self.at[0] if len(self.at) > 1 else self.count


@dataclass(frozen=True)
class Sheet:
    """How large things are, in inches, and whether the columns' names stand upright (0), aslant (45) or turned (90)."""

    cell_width: float
    cell_height: float
    rotation: int

    @classmethod
    def of(cls, down: Labels, across: Labels) -> Sheet:
        """Square cells, as large as the longer side allows; oblong ones only where a side is too long for its names."""
        width, height = cell_size(across.count), cell_size(down.count)
        if min(width, height) >= SMALLEST_LABELLED_CELL:
            width = height = min(width, height)
        else:
            width, height = min(width, SMALLEST_LABELLED_CELL), min(height, SMALLEST_LABELLED_CELL)
        room = across.spacing * width
        upright = across.width * font_size(width) / _POINTS <= 0.92 * room
        return cls(width, height, rotation=0 if upright else 45 if room >= 0.25 else 90)

    @property
    def square(self) -> bool:
        """Whether every cell is square, with room for its name."""
        return self.cell_width == self.cell_height >= SMALLEST_LABELLED_CELL


def cell_size(count: int) -> float:
    """Of as many cells beside each other."""
    comfortable = min(_LARGEST_CELL, max(SMALLEST_LABELLED_CELL, _USUAL_SIDE / count))
    return min(comfortable, _LONGEST_SIDE / count)


def font_size(cell: float) -> float:
    """In points, of the names of cells."""
    return min(11.0, max(7.0, 0.66 * cell * _POINTS))


def text_width(text: str) -> float:
    """About how wide a text is, in units of the font size."""
    return sum(1.0 if unicodedata.east_asian_width(character) in "WF" else 0.62 for character in text)


def page(width: float) -> Axes:
    """Axes on a page of no window, about so many inches wide; `fit` cuts the page to what is drawn."""
    return require("matplotlib.figure", extra="plots").Figure(figsize=(width, width)).add_subplot()


def fit(axes: Axes, size: tuple[float, float]) -> Figure:
    """The figure, with axes of `size` inches and as large as they and all that is written beside them."""
    figure: Any = axes.figure
    wide, high = figure.get_size_inches()
    axes.set_position((0, 0, size[0] / wide, size[1] / high))
    drawn: Any = axes.get_tightbbox()
    box = drawn.transformed(figure.dpi_scale_trans.inverted())
    wide, high = box.width + 2 * _MARGIN, box.height + 2 * _MARGIN
    figure.set_size_inches(wide, high)
    axes.set_position(((_MARGIN - box.x0) / wide, (_MARGIN - box.y0) / high, size[0] / wide, size[1] / high))
    return figure


def folded(notes: Sequence[str], width: float) -> list[str]:
    """The notes as lines that fit in so many inches."""
    return textwrap.wrap("; ".join(notes), max(24, int(width * _NOTE_CHARACTERS)))


def name(axis: Axis, labels: Labels, cell: float, family: list[str], rotation: int = 0) -> None:
    """Write the names along an axis; a short line shows which cell is meant where not every one is named."""
    slant = {"rotation": rotation, "rotation_mode": "anchor", "ha": "left", "va": "center"} if rotation else {}
    axis.set_ticks(labels.at, labels=labels.texts, fontsize=font_size(cell), fontfamily=family, **PLAIN, **slant)
    axis.set_tick_params(length=0 if labels.step == 1 else 2, width=0.5)


def head(axes: Axes, title: str | None, width: float, above: float = 0.0) -> None:
    """The title, in lines of about `width` inches; `above` are points left free between it and the names."""
    if title:
        longest = max(_LEAST_CHARACTERS, int(width / _CHARACTER))
        lines = (phrase(line, _MOST_CHARACTERS) for line in title.splitlines())
        text = "\n".join(textwrap.fill(line, longest) if len(line) > longest else line for line in lines)
        axes.set_title(text, fontfamily=families(text), fontsize=12, pad=6 + above, **PLAIN)


def foot(axes: Axes, lines: Sequence[str], below: float = 0.0) -> None:
    """Notes from the left edge of the axes, so many inches below them."""
    if lines:
        axes.xaxis.set_label_position("bottom")
        axes.set_xlabel("\n".join(lines), fontsize=8, color="0.35", loc="left", labelpad=4 + below * _POINTS)
        axes.xaxis.label.set(ha="left", linespacing=1.25, fontfamily=families("".join(lines)), **PLAIN)


def ordinal(number: int) -> str:
    """A number in a row.

    >>> ordinal(2), ordinal(11), ordinal(1003)
    ('2nd', '11th', '1,003rd')
    """
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number:,}{ending}"


def _round_step(length: int, most: int) -> int:
    """The least of 1, 2, 5, 10, ... that makes at most so many steps."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if -(-length // (power * factor)) <= most:
                return power * factor
        power *= 10


_FORMATS = (".png", ".svg", ".pdf")

# Text that can be searched, copied and edited, in place of outlines; in PDF with the fonts embedded as TrueType, which
# publishers ask for. Without a date and with fixed names the same figure is the same file.
_SETTINGS = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "regard"}
_NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def save(figure: Figure, path: str | Path, *, dpi: float = 300) -> None:
    """Write a figure as PNG, SVG or PDF, as the ending of `path` says.

    In SVG and PDF the weights are one raster of `dpi` dots an inch, and everything else is lines and text that stays
    text. An SVG names its fonts and does not hold them. matplotlib's settings are as before afterwards.

    Raises:
        ConfigurationError: another ending; `dpi` that is not above 0.
        OSError: the file cannot be written.

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
    # On the way to a PDF fontTools lists the tables that it leaves out of a font, as warnings.
    fonts = logging.getLogger("fontTools.subset")
    fonts.addFilter(_is_error)
    try:
        with require("matplotlib", extra="plots").rc_context(_SETTINGS):
            figure.savefig(path, dpi=dpi, metadata=_NO_DATE.get(ending))
    finally:
        fonts.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
