"""Which fonts draw a text: matplotlib's own has no Hangul and no Chinese characters, and would draw boxes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import unicodedata
import warnings
from pathlib import Path

from regard.errors import require

_NO_FONTS = {"Last Resort", "LastResort", "Emoji"}  # these have boxes or coloured bitmaps in place of outlines


def families(text: str) -> list[str]:
    """Names of font families that together draw every character of `text`, for the `fontfamily` of matplotlib texts.

    matplotlib takes each character from the first family of the list that has it. The list starts with the user's own
    font (rcParams), and goes on only for the characters that it lacks: with the installed font that draws most of
    them, or NanumGothic of the package koreanize-matplotlib, and so on until nothing is missing. No rcParams change;
    fonts of packages are made known to matplotlib's font manager under their own names.

    A character that no font has is drawn as a box, and a UserWarning names it.
    """
    matplotlib = require("matplotlib", extra="plots")
    manager = require("matplotlib.font_manager", extra="plots")
    chosen = list(matplotlib.rcParams["font.family"])
    missing = {ord(character) for character in text} - _invisible(text)
    for family in chosen:
        missing -= _coverage(manager.findfont(manager.FontProperties(family=[family])))
    if missing:
        candidates = _candidates(manager)
        while best := _best(candidates, missing):
            chosen.append(best)
            missing -= candidates[best]
    return chosen + (_boxes(missing, manager) if missing else [])


def _boxes(missing: set[int], manager) -> list[str]:
    """Say what cannot be drawn, once; the font of boxes keeps matplotlib from warning of each character again."""
    characters = " ".join(f"{chr(code)} (U+{code:04X})" for code in sorted(missing)[:10])
    more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
    warnings.warn(
        f"no font has {characters}{more}: boxes are drawn instead. Install a font that has them, for instance "
        "Noto Sans CJK (Debian and Ubuntu: apt-get install fonts-noto-cjk); for Korean pip install 'regard[plots]'",
        stacklevel=_callers_level(),
    )
    return [font.name for font in manager.fontManager.ttflist if font.name.startswith("Last Resort")][:1]


def _callers_level() -> int:
    """How many calls lie between the warning and the code that asked for a picture."""
    frames = inspect.stack(context=0)[1:]
    own = (frame.frame.f_globals.get("__name__", "").startswith("regard.plots") for frame in frames)
    return next((level for level, within in enumerate(own, start=1) if not within), 1)


def _best(candidates: dict[str, frozenset[int]], missing: set[int]) -> str | None:
    """The family that draws most of what is missing, if any draws some of it."""
    family = max(candidates, key=lambda name: len(missing & candidates[name]), default=None)
    return family if family and missing & candidates[family] else None


def _candidates(manager) -> dict[str, frozenset[int]]:
    """What each upright, regular font draws: the installed ones, sans serif first, then those that packages bring."""
    for path in packaged_fonts():
        if not any(font.fname == str(path) for font in manager.fontManager.ttflist):
            manager.fontManager.addfont(str(path))
    packaged = {str(path) for path in packaged_fonts()}
    fonts = [font for font in manager.fontManager.ttflist if _is_plain(font)]
    # The order counts: of fonts that draw as much, the first is taken.
    fonts.sort(key=lambda font: (font.fname in packaged, "Sans" not in font.name and "Gothic" not in font.name))
    return {font.name: _coverage(font.fname) for font in fonts}


def _is_plain(font) -> bool:
    upright = font.style == "normal" and font.variant == "normal" and str(font.weight) in {"400", "normal", "regular"}
    return upright and not any(word in font.name for word in _NO_FONTS)


def packaged_fonts() -> list[Path]:
    """The font files that the extra `plots` brings; the package is not imported: importing it changes rcParams."""
    spec = importlib.util.find_spec("koreanize_matplotlib")
    folders = (spec.submodule_search_locations or []) if spec else []
    return [file for folder in folders for file in [Path(folder, "fonts", "NanumGothic.ttf")] if file.is_file()]


@functools.cache
def _coverage(path: str) -> frozenset[int]:
    """The code points that a font file draws; none if FreeType cannot draw from it."""
    try:
        font = require("matplotlib.ft2font", extra="plots").FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()


def _invisible(text: str) -> set[int]:
    """Code points that need no glyph: format characters, and line ends in a title."""
    return {ord(character) for character in text if unicodedata.category(character) in {"Cf", "Cc", "Zl", "Zp"}}
