"""Check weights and tokens for a figure, and pool long inputs to cells."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.plots.labels import shortened

Reduce = Literal["max", "mean", "sum"]

MOST_CELLS = 512
"""Longer sides are pooled."""

_AT_ONCE = 1 << 22  # weights
_REDUCTIONS = {"max": numpy.maximum, "mean": numpy.add, "sum": numpy.add}


@dataclass(frozen=True)
class Pooling:
    """How weights are pooled for a figure, or already were: to the largest, the mean or the sum of each cell.

    reduce: "max", "mean" or "sum". size: the rows and columns of weights in a cell, or one number for both; the last
    cells may have fewer, as in the levels of an atlas. Without a size, weights that are pooled already have for cell c
    of C over M rows the rows ⌊c·M/C⌋ to ⌊(c+1)·M/C⌋ - 1, as `regard.lenses.Pooled` makes them.

    Raises:
        ConfigurationError: another `reduce`; sizes that are no whole numbers of at least 1.

    >>> Pooling("mean", size=98)
    Pooling(reduce='mean', size=(98, 98))
    """

    reduce: Reduce = "max"
    size: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise ConfigurationError(f"Pooling needs reduce as 'max', 'mean' or 'sum'; it is {self.reduce!r}")
        if self.size is None:
            return
        both = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        if len(both) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in both):
            raise ConfigurationError(
                "Pooling needs size as a whole number of at least 1, or two of them for rows and columns; it is "
                f"{both!r}"
            )
        object.__setattr__(self, "size", both)

    def sizes(self) -> tuple[int, int] | None:
        """The rows and columns of a cell; None without a size."""
        return self.size if isinstance(self.size, tuple) or self.size is None else (self.size, self.size)


@dataclass(frozen=True)
class CellAxis:
    """The tokens along one side, and the edges of its cells: cell c has the tokens edges[c] to edges[c + 1] - 1."""

    tokens: Sequence[str]
    edges: numpy.ndarray

    @classmethod
    def uniform(cls, tokens: Sequence[str], size: int = 1) -> CellAxis:
        """Cells of `size` tokens; the last may have fewer."""
        return cls(tokens, numpy.array([*range(0, len(tokens), size), len(tokens)]))

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self.edges) - 1

    @property
    def pooled(self) -> bool:
        """Whether any cell has several tokens."""
        return self.cells < len(self.tokens)

    def place(self, position: float) -> float:
        """The coordinate of the middle of a token, where cell c reaches from c - 1/2 to c + 1/2.

        >>> CellAxis.uniform("abcdef", 3).place(1), CellAxis.uniform("abcdef").place(1)
        (0.0, 1.0)
        """
        return float(numpy.interp(position + 0.5, self.edges, numpy.arange(len(self.edges)))) - 0.5

    def __str__(self) -> str:
        """The number of tokens in a cell, such as "98" or "97–98", without a shorter last cell."""
        sizes = numpy.diff(self.edges)
        least, most = min(sizes[:-1], default=sizes[-1]), max(sizes)
        return f"{least}" if least == most else f"{least}–{most}"


@dataclass(frozen=True)
class PooledWeights:
    """Weights as cells: `values` float64, masked where not finite; `hidden`, True where no pair exists."""

    values: numpy.ma.MaskedArray
    hidden: numpy.ndarray
    down: CellAxis
    across: CellAxis
    reduce: Reduce

    @property
    def pooling_note(self) -> str:
        """The note on pooling; empty where each cell is one weight."""
        if not (self.down.pooled or self.across.pooled):
            return ""
        return f"each cell: {self.reduce} of {self.down} × {self.across} weights"

    @property
    def notes(self) -> list[str]:
        """The notes on the cells: pooling, masked pairs, numbers that are not finite."""
        broken = int((numpy.ma.getmaskarray(self.values) & ~self.hidden).sum())
        has = "cell has" if broken == 1 else "cells have"
        return [
            *([self.pooling_note] if self.pooling_note else []),
            *(["hatched: left out by the mask"] if self.hidden.any() else []),
            *([f"grey: {broken:,} {has} NaN or infinity"] if broken else []),
        ]


def pool_weights(
    weights: ArrayLike | Tensor,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    mask: ArrayLike | Tensor | None = None,
    pooling: Pooling | None = None,
) -> PooledWeights:
    """Pool weights [rows, columns] to at most 512 × 512 cells, or as `pooling` specifies.

    `mask` has the shape of the weights, True where a pair exists; other pairs count as weight 0.

    Raises:
        ShapeError: the weights are no matrix or are empty; they fit neither the tokens nor the cells; another mask.
        DtypeError: a mask that is not bool.

    >>> pool_weights([[0.5, 0.5, 0.0, 0.0]], ["a"], list("bcde"), pooling=Pooling("sum", size=(1, 2))).values.tolist()
    [[1.0, 0.0]]
    """
    values = matrix(weights)
    check_tokens(rows=rows, columns=columns)
    exists = _mask(mask, values)
    whole = values.shape == (len(rows), len(columns))
    if whole or pooling is None:
        if not whole or not values.numel():
            checked_matrix(values, rows, columns)  # raises
        default = tuple(-(-len(tokens) // MOST_CELLS) for tokens in (rows, columns))
        size = (pooling and pooling.sizes()) or default
        reduce = pooling.reduce if pooling else "max"
        down, across = (CellAxis.uniform(tokens, n) for tokens, n in zip((rows, columns), size, strict=True))
        return _pool(values, exists, down, across, reduce)
    down, across = _pooled_axes(tuple(values.shape), rows, columns, pooling)
    hidden = numpy.zeros(tuple(values.shape), bool) if exists is None else ~exists
    return PooledWeights(_finite(values.to(torch.float64).numpy(), hidden), hidden, down, across, pooling.reduce)


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


def _pooled_axes(
    shape: tuple[int, ...], rows: Sequence[str], columns: Sequence[str], pooling: Pooling
) -> tuple[CellAxis, CellAxis]:
    """The axes of weights that are pooled already."""
    lengths, size = (len(rows), len(columns)), pooling.sizes()
    if size:
        expected = tuple(-(-n // s) for n, s in zip(lengths, size, strict=True))
        if shape != expected:
            raise ShapeError(
                f"weights is {shape[0]} × {shape[1]}; {lengths[0]:,} rows and {lengths[1]:,} columns in cells of "
                f"{size[0]} × {size[1]} are {expected[0]} × {expected[1]}: give these, or all {lengths[0]:,} × "
                f"{lengths[1]:,} weights"
            )
        return CellAxis.uniform(rows, size[0]), CellAxis.uniform(columns, size[1])
    if not all(1 <= count <= length for count, length in zip(shape, lengths, strict=True)):
        raise ShapeError(
            f"weights is {shape[0]} × {shape[1]}: so many cells cannot have a token each of {lengths[0]:,} rows and "
            f"{lengths[1]:,} columns; pooled weights have at least one cell and at most as many as tokens"
        )
    edges = (numpy.arange(c + 1) * n // c for c, n in zip(shape, lengths, strict=True))
    return CellAxis(rows, next(edges)), CellAxis(columns, next(edges))


def _pool(
    values: Tensor, exists: numpy.ndarray | None, down: CellAxis, across: CellAxis, reduce: Reduce
) -> PooledWeights:
    """Pool weights, some rows of cells at a time, so that long inputs are never copied whole."""
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
    return PooledWeights(_finite(pooled, hidden), hidden, down, across, reduce)


def reduced(reduction: numpy.ufunc, values: numpy.ndarray, down: numpy.ndarray, across: numpy.ndarray) -> numpy.ndarray:
    """Reduce each cell to one number; `down` and `across` are the edges of cells.

    >>> reduced(numpy.maximum, numpy.array([[1.0, 3.0, 2.0]]), numpy.array([0, 1]), numpy.array([0, 2, 3]))
    array([[3., 2.]])
    """
    return reduction.reduceat(reduction.reduceat(values, down[:-1], axis=0), across[:-1], axis=1)


def _finite(values: numpy.ndarray, hidden: numpy.ndarray) -> numpy.ma.MaskedArray:
    return numpy.ma.masked_array(values, mask=~numpy.isfinite(values) | hidden)


def checked_matrix(weights: ArrayLike | Tensor, rows: Sequence[str], columns: Sequence[str]) -> Tensor:
    """The weights as a float64 matrix [R, C] on the CPU, with a row and a column for each token.

    Raises:
        ShapeError: the weights are no matrix, are empty, or do not have a row and a column for each token.

    >>> checked_matrix([[0.25, 0.75]], ["Haus"], ["the", "house"]).shape
    torch.Size([1, 2])
    """
    values = matrix(weights).to(torch.float64)
    check_tokens(rows=rows, columns=columns)
    if values.shape != (len(rows), len(columns)):
        raise ShapeError(
            f"weights is {values.shape[0]} × {values.shape[1]}, but there are {len(rows)} rows and {len(columns)} "
            f"columns; it needs a row per output token and a column per input token{_advice(values, rows, columns)}"
        )
    if not values.numel():
        raise ShapeError(f"weights is {len(rows)} × {len(columns)}: there is nothing to draw")
    return values


def matrix(weights: ArrayLike | Tensor) -> Tensor:
    """The weights as a matrix on the CPU, in their own dtype.

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
    """A tensor on the CPU from a tensor, array or nested lists.

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
    """A tensor that shares the array's memory where torch can: not with negative strides or a foreign byte order."""
    if min(array.strides, default=0) < 0 or not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    with warnings.catch_warnings():
        # Nothing here writes to the weights, so a read-only array, such as a memory map, is fine.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.as_tensor(array)


def check_tokens(**sides: Sequence[str]) -> None:
    """Check that the tokens of each side are a list of texts and not one text; keywords are names for messages.

    Raises:
        ShapeError: tokens are one text, no list, or no texts.

    >>> check_tokens(rows=["the"])
    """
    for name, tokens in sides.items():
        if isinstance(tokens, str):
            text = repr(shortened(tokens))
            raise ShapeError(f"{name} is one text, {text}; it needs to be a list of tokens, as list({name}) gives")
        if not hasattr(tokens, "__len__") or not hasattr(tokens, "__getitem__"):
            raise ShapeError(f"{name} needs to be a list of tokens, such as ['the', 'house']; it is {tokens!r}")
        other = next((token for token in tokens if not isinstance(token, str)), None)
        if other is not None:
            raise ShapeError(
                f"{name} needs tokens as texts, and one is {other!r}: give list(map(str, {name})), or what a "
                "tokenizer's convert_ids_to_tokens gives"
            )


def _advice(values: Tensor, rows: Sequence[str], columns: Sequence[str]) -> str:
    swapped = values.shape == (len(columns), len(rows))
    return "; transpose it, or swap rows and columns" if swapped else ""
