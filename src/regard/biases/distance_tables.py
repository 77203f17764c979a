"""Biases that content and distance decide: a table for each query or key, read by distance, and vectors by distance.

They are made in a call, from its queries and keys: `shaw`, `transformer_xl` and `deberta` are what users write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.finite import waits
from ..core.grid import Grid
from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError
from .base import Bias, any_needed, describe_tensor
from .distance_index import DistanceIndex
from .relative import diagonals


class ContentBias(Bias):
    """A bias that is declared without queries, keys and positions; `regard.attention` binds it to those of a call."""

    @property
    def by_position(self) -> bool:
        return False

    def values(self, grid: Grid) -> Tensor:
        raise ConfigurationError(
            f"{self!r} depends on the queries and keys of a call: give it to regard.attention as bias=, or bind it "
            "with .bound(problem), whose result can be evaluated"
        )


class CallBias(Bias):
    """A bias from tensors of one call, (..., heads, length, width) each, with a row for each query, key or column.

    Axes in front broadcast to those of the weights. A tile reads, and adds gradients to, its own rows alone.
    """

    @property
    def by_position(self) -> bool:
        return False


@dataclass(frozen=True, eq=False, repr=False)
class QueryTable(CallBias):
    """table[query, index(key position - query position)]: a number of the query's own for each distance.

    Shapes: table (..., heads, M, index.count).
    """

    table: Tensor
    index: DistanceIndex

    def values(self, grid: Grid) -> Tensor:
        rows, found = at_least_float32(self.table[..., grid.rows, :]), self.index(_distances(grid))
        if (column := _only(found)) is not None:
            return rows[..., column : column + 1]
        return _gather(rows, found)  # [..., H, m, n]

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        (target,) = into
        if target is not None:
            _scatter_add(target[..., grid.rows, :], self.index(_distances(grid)), upstream)

    def __repr__(self) -> str:
        return f"query table {describe_tensor(self.table)} by distance"


@dataclass(frozen=True, eq=False, repr=False)
class KeyTable(CallBias):
    """table[key, index(key position - query position)]: a number of the key's own for each distance.

    Shapes: table (..., heads, N, index.count).
    """

    table: Tensor
    index: DistanceIndex

    def values(self, grid: Grid) -> Tensor:
        columns, found = at_least_float32(self.table[..., grid.columns, :]), self.index(_distances(grid))
        if (column := _only(found)) is not None:
            return columns[..., column : column + 1].mT
        return _gather(columns, found.mT).mT  # [..., H, m, n]

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        (target,) = into
        if target is not None:
            _scatter_add(target[..., grid.columns, :], self.index(_distances(grid)).mT, upstream.mT)

    def __repr__(self) -> str:
        return f"key table {describe_tensor(self.table)} by distance"


@dataclass(frozen=True, eq=False, repr=False)
class QueryVectors(CallBias):
    """query · vectors[index(key position - query position)]: one product for each query and diagonal of a tile.

    For more distances than a table for each query has room for. Shapes: query (..., heads, M, D), vectors
    (heads or 1, index.count, D).
    """

    query: Tensor
    vectors: Tensor
    index: DistanceIndex

    def values(self, grid: Grid) -> Tensor:
        rows = at_least_float32(self.query[..., grid.rows, :])
        chosen, found = self._chosen(grid)
        products = rows @ at_least_float32(self.vectors[..., chosen, :]).mT  # [..., H, m, number of distances]
        return _unskewed(products, *grid.shape) if found is None else _gather(products, found)

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        if not any_needed(into):
            return
        rows = at_least_float32(self.query[..., grid.rows, :])
        chosen, found = self._chosen(grid)
        if found is None:
            products = _skewed_zeros(upstream)
        else:
            products = upstream.new_zeros(*upstream.shape[:-1], len(chosen))
            _scatter_add(products, found, upstream)
        of_query, of_vectors = into
        if of_query is not None:
            gradient = products @ at_least_float32(self.vectors[..., chosen, :])
            of_query[..., grid.rows, :] += gradient.sum_to_size(of_query[..., grid.rows, :].shape)
        if of_vectors is not None:
            gradient = products.mT @ rows
            of_vectors.index_add_(-2, chosen, gradient.sum_to_size(*of_vectors.shape[:-2], *gradient.shape[-2:]))

    def _chosen(self, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """The columns that a tile needs, and for each pair the number of its own among them; None: its diagonal's."""
        along = diagonals(grid)
        if along is not None:
            return self.index(along), None
        found = self.index(_distances(grid))
        if under_transform() or waits(found):
            return torch.arange(self.index.count, device=found.device), found
        return torch.unique(found, return_inverse=True)

    def __repr__(self) -> str:
        return f"query {describe_tensor(self.query)} · vectors {describe_tensor(self.vectors)} by distance"


def _distances(grid: Grid) -> Tensor:
    """Key position - query position of each pair of a tile, (m, n) or (*batch, 1, m, n)."""
    return grid.key - grid.query


def _only(found: Tensor) -> int | None:
    """The column of all pairs of a tile where they have the same, as far from the diagonal; None where not, or unknown.

    A device would have to be waited for.
    """
    if under_transform() or waits(found) or not found.numel():
        return None
    low, high = found.aminmax()
    return int(low) if low == high else None


def _gather(rows: Tensor, found: Tensor) -> Tensor:
    """rows[..., i, found[..., i, j]], (..., m, n), for rows (..., m, columns) and found (..., m, n)."""
    leading = broadcast_shapes(rows.shape[:-1], found.shape[:-1])
    return rows.expand(*leading, -1).gather(-1, found.expand(*leading, -1))


def _scatter_add(target: Tensor, found: Tensor, upstream: Tensor) -> None:
    """Add the gradient of `_gather` to that of its rows, (..., m, columns), in place."""
    leading = broadcast_shapes(target.shape[:-2], found.shape[:-2])
    upstream = at_least_float32(upstream)
    upstream = upstream.sum_to_size(*leading[max(len(leading) - upstream.ndim + 2, 0) :], *upstream.shape[-2:])
    if (column := _only(found)) is not None:
        total = upstream.sum(-1)
        target[..., column] += total.sum_to_size(target.shape[:-1])
        return
    if leading == target.shape[:-2]:
        target.scatter_add_(-1, found.expand(*leading, *found.shape[-2:]), upstream.to(target.dtype))
        return
    whole = target.new_zeros(*leading, *target.shape[-2:])
    whole.scatter_add_(-1, found.expand(*leading, *found.shape[-2:]), upstream.to(target.dtype))
    target += whole.sum_to_size(target.shape)


def _unskewed(products: Tensor, rows: int, columns: int) -> Tensor:
    """Numbers of diagonals as those of pairs, a view: pair (i, j) is on diagonal j - i + m - 1, of m + n - 1."""
    products = products.contiguous()
    *leading, _, width = products.shape
    strides = (*products.stride()[:-2], width - 1, 1)
    return products.as_strided((*leading, rows, columns), strides, products.storage_offset() + rows - 1)


def _skewed_zeros(pairs: Tensor) -> Tensor:
    """The inverse of `_unskewed`, 0 on diagonals that a row has no pairs on: (..., m, n) to (..., m, m + n - 1)."""
    pairs = at_least_float32(pairs)
    rows, columns = pairs.shape[-2:]
    skewed = pairs.new_zeros(*pairs.shape[:-1], rows + columns - 1)
    _unskewed(skewed, rows, columns).copy_(pairs)
    return skewed
