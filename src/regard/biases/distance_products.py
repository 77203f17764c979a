"""A vector for each distance, of all of few pairs at default positions: products with it, and weighted sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Size, Tensor

from .all_pairs import pair_columns, scaled_product, score_scale
from .distance_index import DistanceIndex

if TYPE_CHECKING:
    from ..core.problem import Problem


class DistanceProduct(NamedTuple):
    """Rows · vectors[index(distance)]; of queries, or `by_key` of keys.

    Shapes: rows (B, H, M or N, D), vectors (H or 1, index.count, D).
    """

    rows: Tensor
    vectors: Tensor
    index: DistanceIndex
    by_key: bool = False

    def of_pairs(self, queries: int, keys: int, scale: float) -> Tensor:
        """The products times the scale, (..., H, M, N)."""
        rows, vectors = self.rows, self.vectors
        leading = rows.shape[1:2] if rows.shape[0] == 1 else rows.shape[:2]
        columns = pair_columns(self.index, queries, keys, leading, by_key=self.by_key)
        products = scaled_product(rows, columns.among(vectors).mT, scale).gather(-1, columns.of_pairs)
        return products.mT if self.by_key else products


class WeightedVectors(NamedTuple):
    """Σ_j weights[i, j] · vectors[index(distance)], which is added to a row for each query.

    Shapes: weights (B, H, M, N), vectors (H or 1, index.count, D), added (B, H, M, D).
    """

    weights: Tensor
    vectors: Tensor
    index: DistanceIndex
    added: Tensor

    def total(self) -> Tensor:
        """The rows with what is added to them, (B, H, M, D)."""
        (*leading, queries, keys), vectors = self.weights.shape, self.vectors
        columns = pair_columns(self.index, queries, keys, Size(leading), by_key=False)
        vectors = columns.among(vectors)
        sums = self.weights.new_zeros(*leading, queries, vectors.shape[1])
        return self.added + scaled_product(sums.scatter_add(-1, columns.of_pairs, self.weights), vectors)


class DistanceRows(Protocol):
    """A backend's code for such products and sums without gradients."""

    def takes(self, products: Sequence[DistanceProduct], queries: int, keys: int) -> bool:
        """Whether it computes with these tensors."""
        ...

    def sum_of_pairs(self, products: Sequence[DistanceProduct], queries: int, keys: int, scale: float) -> Tensor:
        """The sum of them times the scale, (B, H, M, N)."""
        ...

    def takes_sum(self, weighted: WeightedVectors) -> bool:
        """Whether it computes with these tensors."""
        ...

    def total(self, weighted: WeightedVectors) -> Tensor:
        """As `WeightedVectors.total`."""
        ...


_codes: list[DistanceRows] = []


def register_distances(code: DistanceRows) -> None:
    """Have a backend compute the products and sums that it takes."""
    _codes.append(code)


def sum_of_pairs(problem: Problem, products: Sequence[DistanceProduct]) -> Tensor:
    """The scaled sum of one or two products of all pairs, (..., H, M, N); differentiable."""
    sizes = problem.queries, problem.keys, score_scale(problem)
    for code in _codes:
        if code.takes(products, *sizes[:2]):
            return code.sum_of_pairs(products, *sizes)
    terms = [each.of_pairs(*sizes) for each in products]
    return terms[0] if len(terms) == 1 else torch.add(*terms)


def with_vectors(weighted: WeightedVectors) -> Tensor:
    """The rows with what is added to them, (B, H, M, D); differentiable."""
    code = next((code for code in _codes if code.takes_sum(weighted)), None)
    return weighted.total() if code is None else code.total(weighted)
