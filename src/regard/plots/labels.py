"""Weights with a token for each row and column: checked, and the tokens made visible."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ShapeError

_SIGNS = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥"}


def labelled(weights: ArrayLike | Tensor, rows: Sequence[str], columns: Sequence[str]) -> Tensor:
    """The weights as a float64 matrix [R, C] on the CPU, one row per name of `rows`, one column per name of `columns`.

    Raises:
        ShapeError: the weights are no matrix, are empty, or do not have a row and a column for each token.

    >>> labelled([[0.25, 0.75]], ["Haus"], ["the", "house"]).shape
    torch.Size([1, 2])
    """
    values = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    if values.ndim != 2:
        raise ShapeError(
            f"weights has {values.ndim} dims {list(values.shape)}; it needs two, [rows, columns]: "
            "choose one sentence and one head, for instance weights[0, 0]"
        )
    for name, tokens in (("rows", rows), ("columns", columns)):
        if isinstance(tokens, str):
            raise ShapeError(f"{name} is one text, {tokens!r}; it needs to be a list of tokens, as list({name}) gives")
    if values.shape != (len(rows), len(columns)):
        raise ShapeError(
            f"weights is {values.shape[0]} × {values.shape[1]}, but there are {len(rows)} rows and {len(columns)} "
            f"columns; it needs a row per output token and a column per input token{_mend(values, rows, columns)}"
        )
    if not values.numel():
        raise ShapeError(f"weights is {len(rows)} × {len(columns)}: there is nothing to draw")
    return values


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
