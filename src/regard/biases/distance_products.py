"""Products of queries or keys with a vector for each distance, of all of few pairs at default positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

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


class ProductRows(Protocol):
    """A backend's code for such products without gradients."""

    def takes(self, products: Sequence[DistanceProduct], queries: int, keys: int) -> bool:
        """Whether it computes with these tensors."""
        ...

    def sum_of_pairs(self, products: Sequence[DistanceProduct], queries: int, keys: int, scale: float) -> Tensor:
        """The sum of them times the scale, (B, H, M, N)."""
        ...


_codes: list[ProductRows] = []


def register_products(code: ProductRows) -> None:
    """Have a backend compute the products that it takes."""
    _codes.append(code)


def sum_of_pairs(problem: Problem, products: Sequence[DistanceProduct]) -> Tensor:
    """The scaled sum of one or two products of all pairs, (..., H, M, N); differentiable."""
    sizes = problem.queries, problem.keys, score_scale(problem)
    for code in _codes:
        if code.takes(products, *sizes[:2]):
            return code.sum_of_pairs(products, *sizes)
    terms = [each.of_pairs(*sizes) for each in products]
    return terms[0] if len(terms) == 1 else torch.add(*terms)
