"""Which number of a table belongs to a distance: rules for biases whose tables are read by distance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor


class DistanceIndex(ABC):
    """Which of `count` columns belongs to each distance, *key position - query position*."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of columns."""

    @property
    def gradual(self) -> bool:
        """Whether neighbouring distances have the same column or neighbouring ones, always in the same direction."""
        return True

    @abstractmethod
    def __call__(self, distances: Tensor) -> Tensor:
        """The column of each distance, 0..count-1: int64 of any shape to the same."""


@dataclass(frozen=True)
class ClippedDistances(DistanceIndex):
    """clip(distance, -before, after) + before: a column for each near distance, the outer ones for all beyond.

    >>> ClippedDistances(2, 1)(torch.arange(-4, 4)).tolist()
    [0, 0, 0, 1, 2, 3, 3, 3]
    """

    before: int
    after: int

    @property
    def count(self) -> int:
        return self.before + 1 + self.after

    def __call__(self, distances: Tensor) -> Tensor:
        return distances.clamp(-self.before, self.after) + self.before


@dataclass(frozen=True)
class LogBuckets(DistanceIndex):
    """DeBERTa's buckets of query position - key position: up to ±buckets/2 one distance each, beyond by logarithm.

    buckets: b on each side; 0 for as many as max_distance, each of one distance. The column is the bucket plus b, from
    0 to 2b - 1; what is beyond is in the outer ones.

    >>> LogBuckets(4, 16)(torch.arange(-9, 10, 3)).tolist()  # keys before the query have the larger columns
    [7, 7, 7, 4, 1, 1, 1]
    """

    buckets: int
    max_distance: int

    @property
    def span(self) -> int:
        """b, the buckets on each side."""
        return self.buckets or self.max_distance

    @property
    def count(self) -> int:
        return 2 * self.span

    @property
    def gradual(self) -> bool:
        starts = log_bucket_starts(self.buckets, self.max_distance) if self.buckets else ()
        return all(low < high for low, high in pairwise(starts))

    def __call__(self, distances: Tensor) -> Tensor:
        found = -distances
        if self.buckets:
            starts = torch.tensor(log_bucket_starts(self.buckets, self.max_distance), device=distances.device)
            away = distances.abs()
            middle = self.buckets // 2
            far = torch.bucketize(away, starts, right=True) + middle
            found = torch.where(away <= middle, found, far * found.sign())
        return (found + self.span).clamp(0, self.count - 1)


@cache
def log_bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket beyond the middle one, m = buckets/2, up to bucket 2m.

    Bucket m + k, k >= 1, has the distances n > m with ⌈log(n/m) / log((max_distance - 1)/m) · (m - 1)⌉ = k: those
    above m · ((max_distance - 1)/m)^((k - 1)/(m - 1)), compared in whole numbers.

    >>> log_bucket_starts(8, 32)
    (5, 8, 16, 32)
    """
    middle, starts = buckets // 2, []
    n = middle + 1
    for k in range(1, middle + 1):
        # n^(m-1) · m^(k-1) > m^(m-1) · (max_distance - 1)^(k-1)
        bound = middle ** (middle - k) * (max_distance - 1) ** (k - 1)
        n = max(n, _root_above(bound, middle - 1))
        starts.append(n)
    return tuple(starts)


def _root_above(bound: int, power: int) -> int:
    """The smallest whole number n with n^power > bound, by bisection."""
    low, high = 0, 1 << (bound.bit_length() // power + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**power > bound else (middle, high)
    return high


@dataclass(frozen=True)
class EachDistance(DistanceIndex):
    """distance - first: a column for each of `count` distances from `first` on."""

    first: int
    length: int

    @property
    def count(self) -> int:
        return self.length

    def __call__(self, distances: Tensor) -> Tensor:
        return distances - self.first


@dataclass(frozen=True)
class ReachedColumns(DistanceIndex):
    """The columns first..first + length - 1 of another index, that a mask leaves pairs of; all beyond, the outer ones.

    >>> ReachedColumns(ClippedDistances(2, 2), 0, 3)(torch.arange(-3, 4)).tolist()  # of a causal mask
    [0, 0, 1, 2, 2, 2, 2]
    """

    whole: DistanceIndex
    first: int
    length: int

    @property
    def count(self) -> int:
        return self.length

    @property
    def gradual(self) -> bool:
        return self.whole.gradual

    def __call__(self, distances: Tensor) -> Tensor:
        return (self.whole(distances) - self.first).clamp(0, self.length - 1)
