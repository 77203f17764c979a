"""Figures as files, with their text as text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import ConfigurationError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
