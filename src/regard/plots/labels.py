"""Text of labels: visible forms of tokens, and font families that have glyphs for all their characters."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import unicodedata
import warnings
from pathlib import Path

from regard.errors import require

_SIGNS = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥"}
_LONGEST = 24


def token_label(token: str, longest: int = _LONGEST) -> str:
    r"""The visible form of a token, truncated to the length of a label.

    >>> token_label("\u202eabc"), token_label("a" * 1_000_000, longest=4)
    ('U+202Eabc', 'aaa…')
    """
    # Cut first: a token may be megabytes long.
    return shortened(visible(token[: longest + 1]), longest)


def phrase(text: str, longest: int = _LONGEST) -> str:
    """`token_label` for a text of several words, with spaces unchanged.

    >>> phrase("previous  token")
    'previous token'
    """
    return shortened(" ".join(token_label(word, longest) for word in text[: 10 * longest].split()), longest)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """At most `longest` characters, the last one an ellipsis where some are cut.

    >>> shortened("Aufmerksamkeit", 6)
    'Aufme…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def visible(token: str) -> str:
    r"""A visible form of a token: signs for white space, code points for unprintable characters.

    >>> visible(" the"), visible("\n"), visible("a\u200b")
    ('␣the', '↵', 'aU+200B')
    """
    text = "".join(_sign(character) for character in token)
    # A combining character needs a base.
    return "◌" + text if text and unicodedata.category(text[0]).startswith("M") else text


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if character.isspace():
        return "␣"
    return character if character.isprintable() else f"U+{ord(character):04X}"


_NO_FONTS = {"Last Resort", "LastResort", "Emoji"}  # these have boxes or coloured bitmaps instead of outlines


def font_families(text: str) -> list[str]:
    """Font families that together have every character of `text`, for the `fontfamily` of matplotlib texts.

    matplotlib takes each character from the first family that has it. The list starts with the user's own font
    (rcParams); for missing characters follows the installed font that has most of them, or NanumGothic of the package
    koreanize-matplotlib, until nothing is missing. rcParams do not change; fonts of packages are registered with
    matplotlib's font manager under their own names.

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
    """Warn once of missing characters, and return the font of boxes, so that matplotlib does not warn of each again."""
    characters = " ".join(f"{chr(code)} (U+{code:04X})" for code in sorted(missing)[:10])
    more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
    warnings.warn(
        f"no font has {characters}{more}: boxes are drawn instead. Install a font that has them, for instance "
        "Noto Sans CJK (Debian and Ubuntu: apt-get install fonts-noto-cjk); for Korean pip install 'regard[plots]'",
        stacklevel=_callers_level(),
    )
    return [font.name for font in manager.fontManager.ttflist if font.name.startswith("Last Resort")][:1]


def _callers_level() -> int:
    """The stack level of the first caller outside `regard.plots`, for warnings."""
    frames = inspect.stack(context=0)[1:]
    own = (frame.frame.f_globals.get("__name__", "").startswith("regard.plots") for frame in frames)
    return next((level for level, within in enumerate(own, start=1) if not within), 1)


def _best(candidates: dict[str, frozenset[int]], missing: set[int]) -> str | None:
    """The family that has the most missing characters; None where none has any."""
    family = max(candidates, key=lambda name: len(missing & candidates[name]), default=None)
    return family if family and missing & candidates[family] else None


def _candidates(manager) -> dict[str, frozenset[int]]:
    """The characters of each upright, regular font: installed ones first, sans serif first, then those of packages."""
    for path in packaged_fonts():
        if not any(font.fname == str(path) for font in manager.fontManager.ttflist):
            manager.fontManager.addfont(str(path))
    packaged = {str(path) for path in packaged_fonts()}
    fonts = [font for font in manager.fontManager.ttflist if _is_plain(font)]
    # Of fonts with equally many characters, the first is taken.
    fonts.sort(key=lambda font: (font.fname in packaged, "Sans" not in font.name and "Gothic" not in font.name))
    return {font.name: _coverage(font.fname) for font in fonts}


def _is_plain(font) -> bool:
    upright = font.style == "normal" and font.variant == "normal" and str(font.weight) in {"400", "normal", "regular"}
    return upright and not any(word in font.name for word in _NO_FONTS)


def packaged_fonts() -> list[Path]:
    """The font files of the extra `plots`, found without importing the package, which would change rcParams."""
    spec = importlib.util.find_spec("koreanize_matplotlib")
    folders = (spec.submodule_search_locations or []) if spec else []
    return [file for folder in folders for file in [Path(folder, "fonts", "NanumGothic.ttf")] if file.is_file()]


@functools.cache
def _coverage(path: str) -> frozenset[int]:
    """The code points of a font file; none if FreeType cannot read it."""
    try:
        font = require("matplotlib.ft2font", extra="plots").FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(font.get_charmap()) if font.scalable else frozenset()


def _invisible(text: str) -> set[int]:
    """The code points of a text that need no glyph: format characters and line ends."""
    return {ord(character) for character in text if unicodedata.category(character) in {"Cf", "Cc", "Zl", "Zp"}}
