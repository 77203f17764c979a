"""One number of a table written out with its arithmetic, the line "by hand" below the table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .table_formats import factor_text, number_text

LONGEST_EXAMPLE = 5
"""Terms that a sum written out below a table has at most."""


def product_example(left: Tensor, right: Tensor, result: Tensor) -> str:
    """Σ left · right written out with its result; empty for sums that are too long to read."""
    if not 0 < len(left) <= LONGEST_EXAMPLE:
        return ""
    terms = (f"{factor_text(a)} · {factor_text(b)}" for a, b in zip(left.tolist(), right.tolist(), strict=True))
    return f"{' + '.join(terms)} = {number_text(float(result), 3)}"


def matrix_example(left: Tensor, right: Tensor, result: Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    """One number of the product of matrices (M, T) and (T, N) written out: the first of those with the most terms."""
    row, column = cell = telling_cell(left.unsqueeze(1) * right.T)
    return named_cell(product_example(left[row], right[:, column], result[cell]), cell, rows, columns)


def quotient_example(parts: Tensor, shares: Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    """One share as the quotient of its part and the sum of its row; empty for sums of 0 or too long to read.

    parts: (M, N), or with more columns behind the N, as that of a sink.
    """
    parts = parts.clamp(min=0.0)  # -inf, of masked pairs of linear attention, counts as 0
    if not 1 < parts.shape[-1] <= LONGEST_EXAMPLE or not bool(parts.any()):
        return ""
    own = parts[:, : shares.shape[-1]]
    row, column = cell = telling_cell(torch.where((own > 0).unsqueeze(-1), parts.unsqueeze(1), 0.0))
    texts = [number_text(part, 3) for part in parts[row].tolist()]
    example = f"{texts[column]} / ({' + '.join(texts)}) = {number_text(float(shares[cell]), 3)}"
    return named_cell(example, cell, rows, columns)


def telling_cell(terms: Tensor) -> tuple[int, int]:
    """The first cell, row by row, with the most terms that are not 0, of terms (M, N, T)."""
    counts = (terms != 0).sum(-1)
    at = counts.flatten().tolist().index(int(counts.max()))
    return at // counts.shape[1], at % counts.shape[1]


def named_cell(example: str, cell: tuple[int, int], rows: Sequence[str], columns: Sequence[str]) -> str:
    """An example with the row and column of its cell in front, where that is not the first of its table."""
    return f"{rows[cell[0]]}, {columns[cell[1]]}: {example}" if example and cell != (0, 0) else example


def feature_names(numbers: Tensor) -> list[str]:
    """The columns of a table of features: 1, 2, ..."""
    return [str(feature) for feature in range(1, numbers.shape[-1] + 1)]


def sum_example(
    result: Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *terms: Sequence[Tensor],
    less: Sequence[Tensor] = (),
) -> str:
    """One number of a sum of products, less another product, written out: the first of those with the most terms.

    Of as many terms it is one with the last, which is what is new. "" where all terms are 0.

    Shapes: result (M, N); the factors of each product broadcast to it.

    >>> one, two = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0]])
    >>> sum_example(one * one + two, ["a"], ["x", "y"], (one, one), (two,))
    '1 · 1 + 3 = 4'
    """
    products = [*terms, less] if less else list(terms)
    spread = [[factor.expand_as(result) for factor in product] for product in products]
    sizes = [torch.stack(product).prod(0) for product in spread]
    if not any(bool(size.any()) for size in sizes):
        return ""
    row, column = cell = telling_cell(torch.stack([*sizes, sizes[-1]], -1))
    texts = [" · ".join(factor_text(float(factor[cell])) for factor in product) for product in spread]
    if len(spread[0]) == 1:  # which needs no brackets in front
        texts[0] = number_text(float(spread[0][0][cell]), 3)
    written = " + ".join(texts[: len(terms)]) + (f" - {texts[-1]}" if less else "")
    return named_cell(f"{written} = {number_text(float(result[row, column]), 3)}", cell, rows, columns)
