"""Weights of any length as a picture has room for them: pooled to cells, and what each cell stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.plots.labels import labelled, listed, matrix, numbers

Reduce = Literal["max", "mean", "sum"]

MOST_CELLS = 512
"""Longer sides are pooled."""

_AT_ONCE = 1 << 22  # weights
_REDUCTIONS = {"max": numpy.maximum, "mean": numpy.add, "sum": numpy.add}


@dataclass(frozen=True)
class Cells:
    """How weights are pooled for a picture, or were already: to the largest, the mean or the sum of each cell.

    reduce: "max", "mean" or "sum". size: the rows and columns of weights in a cell, or one number for both; the last
    cells may have fewer, as in the levels of an atlas. Without a size, weights that are pooled already have for cell c
    of C over M rows the rows ⌊c·M/C⌋ to ⌊(c+1)·M/C⌋ - 1, as `regard.lenses.Pooled` makes them.

    Raises:
        ConfigurationError: another `reduce`; sizes that are no whole numbers of at least 1.

    >>> Cells("mean", size=98)
    Cells(reduce='mean', size=(98, 98))
    """

    reduce: Reduce = "max"
    size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise ConfigurationError(f"Cells needs reduce as 'max', 'mean' or 'sum'; it is {self.reduce!r}")
        if self.size is None:
            return
        both = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(both) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in both):
            raise ConfigurationError(
                f"Cells needs size as a whole number of at least 1, or two of them for rows and columns; it is {both!r}"
            )
        object.__setattr__(self, "size", both)

    def sizes(self) -> tuple[int, int] | None:
        """The rows and columns of a cell, if they are given."""
        return self.size if isinstance(self.size, tuple) or self.size is None else (self.size, self.size)


@dataclass(frozen=True)
class Side:
    """The tokens along one side of a picture, and where its cells begin among them; the last edge is their end."""

    tokens: Sequence[str]
    edges: numpy.ndarray

    @classmethod
    def of(cls, tokens: Sequence[str], size: int = 1) -> Side:
        """In cells of `size` tokens."""
        return cls(tokens, numpy.array([*range(0, len(tokens), size), len(tokens)]))

    @property
    def cells(self) -> int:
        """How many there are."""
        return len(self.edges) - 1

    @property
    def pooled(self) -> bool:
        """Whether a cell has several tokens."""
        return self.cells < len(self.tokens)

    def at(self, position: float) -> float:
        """Where the middle of a token lies, cell c lying from c - 1/2 to c + 1/2.

        >>> Side.of("abcdef", 3).at(1), Side.of("abcdef").at(1)
        (0.0, 1.0)
        """
        return float(numpy.interp(position + 0.5, self.edges, numpy.arange(len(self.edges)))) - 0.5

    def __str__(self) -> str:
        """How many tokens a cell has, such as "98" or "97-98"; the last cell, which is cut off, does not count."""
        sizes = numpy.diff(self.edges)
        least, most = min(sizes[:-1], default=sizes[-1]), max(sizes)
        return f"{least}" if least == most else f"{least}–{most}"


@dataclass(frozen=True)
class Picture:
    """Weights as cells: `values` float64, masked where they are no finite number; `hidden` where no pair exists."""

    values: numpy.ma.MaskedArray
    hidden: numpy.ndarray
    down: Side
    across: Side
    reduce: Reduce

    @property
    def pooled(self) -> str:
        """What a cell shows, or nothing where it shows one weight."""
        if not (self.down.pooled or self.across.pooled):
            return ""
        return f"each cell: {self.reduce} of {self.down} × {self.across} weights"

    @property
    def notes(self) -> list[str]:
        """What a reader needs to know of the cells."""
        broken = int((numpy.ma.getmaskarray(self.values) & ~self.hidden).sum())
        has = "cell has" if broken == 1 else "cells have"
        return [
            *([self.pooled] if self.pooled else []),
            *(["hatched: left out by the mask"] if self.hidden.any() else []),
            *([f"grey: {broken:,} {has} NaN or infinity"] if broken else []),
        ]


def picture(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    mask: ArrayLike | Tensor | None = None,
    cells: Cells | None = None,
) -> Picture:
    """The cells of weights [rows, columns]: pooled where there are more than a page has room for, or as they are.

    `mask` has the shape of the weights, True where a pair exists; the others count as weight 0, whatever they are.

    Raises:
        ShapeError: the weights are no matrix or are empty; they fit neither the tokens nor the cells; another mask.
        DtypeError: a mask that is not bool.

    >>> picture([[0.5, 0.5, 0.0, 0.0]], ["a"], list("bcde"), cells=Cells("sum", size=(1, 2))).values.tolist()
    [[1.0, 0.0]]
    """
    values = matrix(weights)
    listed(rows=rows, columns=columns)
    exists = _mask(mask, values)
    whole = values.shape == (len(rows), len(columns))
    if whole or cells is None:
        if not whole or not values.numel():
            labelled(values, rows, columns)  # says what is wrong
        page = tuple(-(-len(tokens) // MOST_CELLS) for tokens in (rows, columns))
        size = (cells and cells.sizes()) or page
        reduce = cells.reduce if cells else "max"
        down, across = (Side.of(tokens, n) for tokens, n in zip((rows, columns), size, strict=True))
        return _pool(values, exists, down, across, reduce)
    down, across = _sides(tuple(values.shape), rows, columns, cells)
    hidden = numpy.zeros(tuple(values.shape), bool) if exists is None else ~exists
    return Picture(_finite(values.to(torch.float64).numpy(), hidden), hidden, down, across, cells.reduce)


def _mask(mask: ArrayLike | Tensor | None, weights: Tensor) -> numpy.ndarray | None:
    if mask is None:
        return None
    exists = numbers(mask, "mask")
    if exists.dtype != torch.bool:
        raise DtypeError(f"mask is {exists.dtype}; it needs to be bool, True where a query may attend to a key")
    if exists.shape != weights.shape:
        raise ShapeError(
            f"mask is {list(exists.shape)} and weights is {list(weights.shape)}; a mask needs a place for each weight"
        )
    return exists.numpy()


def _sides(shape: tuple[int, ...], rows: Sequence[str], columns: Sequence[str], cells: Cells) -> tuple[Side, Side]:
    """Of weights that are pooled already."""
    lengths, size = (len(rows), len(columns)), cells.sizes()
    if size:
        expected = tuple(-(-n // s) for n, s in zip(lengths, size, strict=True))
        if shape != expected:
            raise ShapeError(
                f"weights is {shape[0]} × {shape[1]}; {lengths[0]:,} rows and {lengths[1]:,} columns in cells of "
                f"{size[0]} × {size[1]} are {expected[0]} × {expected[1]}: give these, or all {lengths[0]:,} × "
                f"{lengths[1]:,} weights"
            )
        return Side.of(rows, size[0]), Side.of(columns, size[1])
    if not all(1 <= count <= length for count, length in zip(shape, lengths, strict=True)):
        raise ShapeError(
            f"weights is {shape[0]} × {shape[1]}: so many cells cannot have a token each of {lengths[0]:,} rows and "
            f"{lengths[1]:,} columns; pooled weights have at least one cell and at most as many as tokens"
        )
    edges = (numpy.arange(c + 1) * n // c for c, n in zip(shape, lengths, strict=True))
    return Side(rows, next(edges)), Side(columns, next(edges))


def _pool(values: Tensor, exists: numpy.ndarray | None, down: Side, across: Side, reduce: Reduce) -> Picture:
    """Some rows of cells after another, so that long inputs are never copied whole."""
    hidden = numpy.zeros((down.cells, across.cells), bool)
    pooled = numpy.empty(hidden.shape)
    many = max(1, _AT_ONCE // (int(numpy.diff(down.edges).max()) * len(across.tokens)))
    for first in range(0, down.cells, many):
        last = min(first + many, down.cells)
        start, stop = down.edges[first], down.edges[last]
        above = down.edges[first : last + 1] - start
        block = values[start:stop].to(torch.float64).numpy()
        if exists is not None:
            block = numpy.where(exists[start:stop], block, 0.0)
            hidden[first:last] = ~reduced(numpy.logical_or, exists[start:stop], above, across.edges)
        pooled[first:last] = reduced(_REDUCTIONS[reduce], block, above, across.edges)
    if reduce == "mean":
        pooled /= numpy.outer(numpy.diff(down.edges), numpy.diff(across.edges))
    return Picture(_finite(pooled, hidden), hidden, down, across, reduce)


def reduced(reduction: numpy.ufunc, values: numpy.ndarray, down: numpy.ndarray, across: numpy.ndarray) -> numpy.ndarray:
    """One number for each cell; `down` and `across` are where cells begin, and then where the last ones end.

    >>> reduced(numpy.maximum, numpy.array([[1.0, 3.0, 2.0]]), numpy.array([0, 1]), numpy.array([0, 2, 3]))
    array([[3., 2.]])
    """
    return reduction.reduceat(reduction.reduceat(values, down[:-1], axis=0), across[:-1], axis=1)


def _finite(values: numpy.ndarray, hidden: numpy.ndarray) -> numpy.ma.MaskedArray:
    return numpy.ma.masked_array(values, mask=~numpy.isfinite(values) | hidden)
