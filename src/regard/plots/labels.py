"""Weights with a token for each row and column: checked, and the tokens made visible.

Which fonts draw a text: matplotlib's own has no Hangul and no Chinese characters, and would draw boxes.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError, require

_SIGNS = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥"}
_LONGEST = 24


def labelled(weights: ArrayLike | Tensor, rows: Sequence[str], columns: Sequence[str]) -> Tensor:
    """The weights as a float64 matrix [R, C] on the CPU, one row per name of `rows`, one column per name of `columns`.

    Raises:
        ShapeError: the weights are no matrix, are empty, or do not have a row and a column for each token.

    >>> labelled([[0.25, 0.75]], ["Haus"], ["the", "house"]).shape
    torch.Size([1, 2])
    """
    values = matrix(weights).to(torch.float64)
    listed(rows=rows, columns=columns)
    if values.shape != (len(rows), len(columns)):
        raise ShapeError(
            f"weights is {values.shape[0]} × {values.shape[1]}, but there are {len(rows)} rows and {len(columns)} "
            f"columns; it needs a row per output token and a column per input token{_mend(values, rows, columns)}"
        )
    if not values.numel():
        raise ShapeError(f"weights is {len(rows)} × {len(columns)}: there is nothing to draw")
    return values


def matrix(weights: ArrayLike | Tensor) -> Tensor:
    """The weights as a matrix on the CPU, of the type that they have.

    Raises:
        ShapeError: the weights are no matrix.

    >>> matrix([[0.25, 0.75]])
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    values = numbers(weights)
    if values.ndim != 2:
        raise ShapeError(
            f"weights has {values.ndim} dims {list(values.shape)}; it needs two, [rows, columns]: "
            "choose one sentence and one head, for instance weights[0, 0]"
        )
    return values


def numbers(weights: object, name: str = "weights") -> Tensor:
    """A tensor on the CPU of what a caller gave as numbers.

    Raises:
        ShapeError: it is no rectangular array of real numbers.

    >>> numbers([[1, 2], [3]])
    Traceback (most recent call last):
    regard.errors.ShapeError: weights needs to be a tensor or rectangular array of real numbers; it is a list
    """
    try:
        values = weights if isinstance(weights, Tensor) else _from_array(numpy.asarray(weights))
    except (TypeError, ValueError, RuntimeError):
        values = None
    if values is None or values.is_complex():
        raise ShapeError(
            f"{name} needs to be a tensor or rectangular array of real numbers; it is a {type(weights).__name__}"
        )
    return values.detach().cpu()


def _from_array(array: numpy.ndarray) -> Tensor:
    """Without a copy where torch can do so: it takes no turned-round axes and no foreign byte order."""
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # Nothing here writes to the weights, so an array that is read-only, such as a memory map, is as good.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)


def listed(**sides: Sequence[str]) -> None:
    """Check that the tokens of each side, called as the argument is, are a list of texts and not one text.

    Raises:
        ShapeError: tokens are one text, no list, or no texts.

    >>> listed(rows=["the"])
    """
    for name, tokens in sides.items():
        if isinstance(tokens, str):
            shown = repr(shortened(tokens))
            raise ShapeError(f"{name} is one text, {shown}; it needs to be a list of tokens, as list({name}) gives")
        if not hasattr(tokens, "__len__") or not hasattr(tokens, "__getitem__"):
            raise ShapeError(f"{name} needs to be a list of tokens, such as ['the', 'house']; it is {tokens!r}")
        other = next((token for token in tokens if not isinstance(token, str)), None)
        if other is not None:
            raise ShapeError(
                f"{name} needs tokens as texts, and one is {other!r}: give list(map(str, {name})), or what a "
                "tokenizer's convert_ids_to_tokens gives"
            )


def shown(token: str, longest: int = _LONGEST) -> str:
    r"""The token made visible, and cut where it is longer than what a label has room for.

    >>> shown("\u202eabc"), shown("a" * 1_000_000, longest=4)
    ('U+202Eabc', 'aaa…')
    """
    # Cut first: a token may be megabytes long.
    return shortened(visible(token[: longest + 1]), longest)


def phrase(text: str, longest: int = _LONGEST) -> str:
    """As `shown`, for a name of several words: spaces between them stay spaces.

    >>> phrase("previous  token")
    'previous token'
    """
    return shortened(" ".join(shown(word, longest) for word in text[: 10 * longest].split()), longest)


def shortened(text: str, longest: int = _LONGEST) -> str:
    """At most so many characters, the last one an ellipsis where some are missing.

    >>> shortened("Aufmerksamkeit", 6)
    'Aufme…'
    """
    return text if len(text) <= longest else text[: longest - 1] + "…"


def visible(token: str) -> str:
    r"""The token as something that can be seen: signs for white space, code points for what has no glyph.

    >>> visible(" the"), visible("\n"), visible("a\u200b")
    ('␣the', '↵', 'aU+200B')
    """
    shown = "".join(_sign(character) for character in token)
    # An accent on its own needs something to sit on.
    return "◌" + shown if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    if character.isspace():
        return "␣"
    return character if character.isprintable() else f"U+{ord(character):04X}"


def _mend(values: Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    swapped = values.shape == (len(columns), len(rows))
    return "; transpose it, or swap rows and columns" if swapped else ""


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
