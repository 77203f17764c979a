"""Products with a vector for each distance, of all pairs, and sums of such vectors by weight, in C."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Size, Tensor

from ...biases.all_pairs import pair_columns
from ...biases.distance_products import DistanceProduct, WeightedVectors, register_distances
from . import library
from .plain_rows import are_plain

MOST_VECTORS = 1024
"""The most vectors, as in looked_up.c."""
MOST_NUMBERS = 2**17
"""Of more pairs, over all heads, torch's operators share the work among threads."""


class DistancesInC:
    """Rows and vectors of float32 on the CPU."""

    def takes(self, products: Sequence[DistanceProduct], queries: int, keys: int) -> bool:
        """Whether they have numbers to read, few, and nothing of torch's watches what becomes of them."""
        batch, heads, *_ = products[0].rows.shape
        if not 0 < batch * heads * queries * keys <= MOST_NUMBERS:
            return False
        for rows, vectors, index, _ in products:
            if index.count > MOST_VECTORS or vectors.shape[0] not in (1, heads):
                return False
            if not are_plain(rows, vectors):
                return False
        return True

    def sum_of_pairs(self, products: Sequence[DistanceProduct], queries: int, keys: int, scale: float) -> Tensor:
        """The sum of them times the scale, (B, H, M, N)."""
        batch, heads, *_ = products[0].rows.shape
        result = torch.empty(batch, heads, queries, keys, dtype=torch.float32, device="cpu")
        for number, (rows, vectors, index, by_key) in enumerate(products):
            columns = pair_columns(index, queries, keys, Size(), by_key=by_key)
            rows, vectors = library.last_contiguous(rows), library.last_contiguous(columns.among(vectors))
            own_heads, count, dim = vectors.shape
            sizes, steps = ((keys, queries), (1, keys)) if by_key else ((queries, keys), (keys, 1))
            numbers = array("q", (batch, heads, *sizes, dim, count, rows.data_ptr(), *rows.stride()[:3]))
            numbers.extend((vectors.data_ptr(), vectors.stride(0) if own_heads > 1 else 0, vectors.stride(1)))
            numbers.extend((columns.of_pairs.data_ptr(), result.data_ptr(), *steps, number))
            library.current().looked_up(numbers.buffer_info()[0], scale)
        return result

    def takes_sum(self, weighted: WeightedVectors) -> bool:
        """The same of weights, vectors and rows."""
        weights, vectors, index, added = weighted
        if not 0 < weights.numel() <= MOST_NUMBERS or index.count > MOST_VECTORS:
            return False
        if vectors.shape[0] not in (1, weights.shape[1]):
            return False
        return are_plain(weights, vectors, added)

    def total(self, weighted: WeightedVectors) -> Tensor:
        """The rows with what is added to them, (B, H, M, D)."""
        weights, vectors, index, added = weighted
        (batch, heads, queries, keys), dim = weights.shape, added.shape[3]
        columns = pair_columns(index, queries, keys, Size(), by_key=False)
        weights, added = library.last_contiguous(weights), library.last_contiguous(added)
        vectors = library.last_contiguous(columns.among(vectors))
        result = torch.empty(batch, heads, queries, dim, dtype=torch.float32, device="cpu")
        numbers = array("q", (batch, heads, queries, keys, dim, vectors.shape[1]))
        numbers.extend((weights.data_ptr(), *weights.stride()[:3], added.data_ptr(), *added.stride()[:3]))
        numbers.extend((vectors.data_ptr(), vectors.stride(0) if vectors.shape[0] > 1 else 0, vectors.stride(1)))
        numbers.extend((columns.of_pairs.data_ptr(), result.data_ptr()))
        library.current().added_vectors(numbers.buffer_info()[0])
        return result


register_distances(DistancesInC())
