"""Numbers of pairs of masks whose rows are spans of keys, without evaluating a pair.

The indicator of a span is 0 or 1, so that a combination of masks is a polynomial of indicators: *A & B* is ab,
*A | B* is a + b - ab, *~A* is 1 - a. A product of spans is a span, from the latest start to the earliest stop; its
length is the number of keys in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Limit: TypeAlias = Tensor | int | None
KeySpan: TypeAlias = Callable[[range], tuple[Limit, Limit]]
"""The keys start..stop-1 that the queries at some positions attend to: each (M,), a number that holds for all of them,
or None without a limit."""
Terms: TypeAlias = dict[frozenset[KeySpan], int]
"""A polynomial of spans: the coefficient of each product."""

ONE: Terms = {frozenset(): 1}
MAX_TERMS = 64
"""The most products that are counted; a union of six masks has 63."""
ROWS = 2**15
"""Rows that are counted at once: their spans fit into a core's cache."""


def weighted_sum(*weighted: tuple[int, Terms]) -> Terms:
    """The sum of polynomials, each times a number."""
    total: Terms = {}
    for weight, terms in weighted:
        for factors, coefficient in terms.items():
            total[factors] = total.get(factors, 0) + weight * coefficient
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


def product(left: Terms, right: Terms) -> Terms:
    """The product of two polynomials of indicators, for which a² = a."""
    return weighted_sum(*((a * b, {f | g: 1}) for f, a in left.items() for g, b in right.items()))


def count_pairs(terms: Terms, queries: range, keys: range) -> int | None:
    """The number of pairs of a polynomial over consecutive positions; None if it has too many terms."""
    if len(terms) > MAX_TERMS:
        return None
    total, spans = 0, {span for factors in terms for span in factors}
    for first in range(0, len(queries), ROWS):
        rows = queries[first : first + ROWS]
        limits = {span: span(rows) for span in spans}
        for factors, coefficient in terms.items():
            start = latest(keys.start, [limits[span][0] for span in factors])
            stop = earliest(keys.stop, [limits[span][1] for span in factors])
            lengths = stop - start
            if isinstance(lengths, Tensor):
                total += coefficient * int(lengths.clamp_(min=0).sum())
            else:
                total += coefficient * max(lengths, 0) * len(rows)
    return total


def latest(start: int, others: Sequence[Limit]) -> Tensor | int:
    """The latest of some starts: a number where no row differs from another.

    >>> latest(2, [None, torch.tensor([0, 3]), 1])
    tensor([2, 3])
    """
    return _extreme(start, others, torch.maximum, max)


def earliest(stop: int, others: Sequence[Limit]) -> Tensor | int:
    """The earliest of some stops: a number where no row differs from another."""
    return _extreme(stop, others, torch.minimum, min)


def _extreme(
    limit: int,
    others: Sequence[Limit],
    of_tensors: Callable[[Tensor, Tensor], Tensor],
    of_numbers: Callable[[int, int], int],
) -> Tensor | int:
    tensors = None
    for other in others:
        if isinstance(other, Tensor):
            tensors = other if tensors is None else of_tensors(tensors, other)
        elif other is not None:
            limit = of_numbers(limit, other)
    if tensors is None:
        return limit
    return tensors.clamp(min=limit) if of_numbers is max else tensors.clamp(max=limit)
