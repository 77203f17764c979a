"""Learned tables over buckets of distances, as in T5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .base import described
from .distances import RelativeBias, looked_up, table_of


@dataclass(frozen=True, eq=False, repr=False)
class Bucketed(RelativeBias):
    """table[head, bucket(key position - query position)]."""

    table: Tensor
    max_distance: int
    bidirectional: bool
    starts: tuple[int, ...]

    def along(self, distances: Tensor) -> Tensor:
        return looked_up(self.table, bucket(distances, self.starts, bidirectional=self.bidirectional))

    def __repr__(self) -> str:
        options = f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        return f"relative({described(self.table)}, {options})"


def relative(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> RelativeBias:
    """table[head, bucket(key position - query position)]: one learned number a head and bucket of distances.

    The buckets are narrow nearby and wide far away. Of the B buckets on one side the first ⌊B/2⌋ hold one distance
    each, 0, 1, 2 and so on; the others reach, in equal steps of the distance's logarithm, to `max_distance`, and the
    last holds everything from there on. `bidirectional` gives the first half of the table to the keys at and before
    the query, the second half to those after it; without it the whole table serves keys at and before the query, and
    keys after it are in bucket 0, where an encoder would see them (a decoder's mask takes them out).

    Shapes: table (heads, buckets); gradients flow into it. transformers stores (buckets, heads): give `weight.T`.
    Units: positions. T5 has no 1/√d: give `scale=1.0` to the call.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, buckets).
        ConfigurationError: fewer than 2 buckets on a side, an odd number for two sides, or a max_distance that does
            not lie beyond the buckets of one distance each.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1, whose rule is the code released with it. That takes
    the logarithm in float32; here the buckets begin where whole-number arithmetic says, the same on every device.

    >>> import torch
    >>> from regard import biases
    >>> from regard.tiles import Grid
    >>> biases.relative(torch.arange(8.0)[None], max_distance=4).values(Grid.of(1, 6))
    tensor([[[3., 3., 3., 2., 1., 0.]]])
    """
    table = table_of(table, "relative", "buckets")
    _check(table.shape[-1], max_distance, bidirectional)
    side = table.shape[-1] // 2 if bidirectional else table.shape[-1]
    return Bucketed(table, max_distance, bidirectional, bucket_starts(side, max_distance))


def bucket(distances: Tensor, starts: tuple[int, ...], *, bidirectional: bool) -> Tensor:
    """The bucket of each distance, *key position - query position*, as `relative` has it, for the starts of a side.

    >>> bucket(torch.tensor([-9, -2, -1, 0, 1, 2, 9]), (1, 2, 3), bidirectional=True).tolist()
    [3, 2, 1, 0, 5, 6, 7]
    """
    away = distances.abs() if bidirectional else (-distances).clamp(min=0)
    found = torch.bucketize(away, torch.tensor(starts, device=distances.device), right=True)
    return found + (len(starts) + 1) * (distances > 0) if bidirectional else found


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket of one side but the first, which holds 0.

    Bucket e + k, where e = ⌊buckets/2⌋ are the buckets of one distance and K = buckets - e the others, begins at the
    smallest n with K · log(n/e) / log(max_distance/e) >= k, which is n^K >= max_distance^k · e^(K-k).

    >>> bucket_starts(8, 32)
    (1, 2, 3, 4, 7, 12, 20)
    """
    exact = buckets // 2
    others = buckets - exact
    starts = list(range(1, exact))
    n = exact
    for k in range(others):
        bound = max_distance**k * exact ** (others - k)
        n = max(n, _root(bound, others))
        starts.append(n)
    return tuple(starts)


def _root(bound: int, power: int) -> int:
    """The smallest whole number whose power is not below a bound, by halving."""
    low, high = 0, 1 << (bound.bit_length() // power + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**power >= bound else (middle, high)
    return high


def _check(buckets: int, max_distance: int, bidirectional: bool) -> None:
    sides = 2 if bidirectional else 1
    if buckets < 2 * sides or buckets % sides:
        need = (
            "an even number of buckets, at least 4, half of them for each side"
            if bidirectional
            else ("at least 2 buckets")
        )
        raise ConfigurationError(
            f"relative needs {need}, as the last axis of its table; with bidirectional={bidirectional} this has "
            f"{buckets}"
        )
    exact = buckets // sides // 2
    if max_distance <= exact:
        raise ConfigurationError(
            f"relative needs a max_distance above {exact}, the distances that have a bucket of their own ({buckets} "
            f"buckets, bidirectional={bidirectional}); it is {max_distance}. Give a longer max_distance, or a table "
            "with fewer buckets"
        )
