"""Weights with a token for each row and column: checked, and the tokens made visible."""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError

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
