"""Which weights dropout keeps, in whole numbers of Python: what the library's tensors have to say, pair by pair."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def kept(seed: int, head: int, query: int, key: int, probability: float) -> bool:
    """Whether one weight is kept; `head` counts the heads of all batches, query and key are row and column.

    Two numbers of 64 bits, one for the row of a head and one for the column, are mixed each by itself; the low halves
    of both are added, and mixed again; the weight is dropped where what comes out, with its sign, is among the lowest
    `probability` of all numbers of 32 bits. A number has its sign throughout: `>>` draws it in from the left.

    >>> [kept(7, 0, 0, key, 0.5) for key in range(6)]
    [True, False, False, False, False, False]
    """
    return _bits(_row(seed, head, query), _column(seed, key)) >= round(probability * 2**32) - 2**31


@lru_cache(maxsize=64)
def kept_weights(seed: int, batch: int, heads: int, queries: int, keys: int, probability: float) -> Tensor:
    """The same for all weights: bool, (batch, heads, M, N)."""
    columns, least = [_column(seed, key) for key in range(keys)], round(probability * 2**32) - 2**31
    rows = [_row(seed, head, query) for head in range(batch * heads) for query in range(queries)]
    pattern = [[_bits(row, column) >= least for column in columns] for row in rows]
    return torch.tensor(pattern, dtype=torch.bool).view(batch, heads, queries, keys)


def _row(seed: int, head: int, query: int) -> int:
    return _mixed(_mixed(seed + head) + query)


def _column(seed: int, key: int) -> int:
    return _mixed(seed - 1 - key)


def _mixed(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), of numbers with a sign."""
    number = _signed(number * 0x9E3779B97F4A7C15, 64)
    number = _signed((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9, 64)
    number = _signed((number ^ (number >> 27)) * 0x94D049BB133111EB, 64)
    return number ^ (number >> 31)


def _bits(row: int, column: int) -> int:
    """32 bits of a pair."""
    number = _signed(row + column, 32)
    number = _signed((number ^ (number >> 16)) * 0x7FEB352D, 32)
    return _signed((number ^ (number >> 15)) * 0x846CA68B, 32)


def _signed(number: int, bits: int) -> int:
    """The lowest bits of a number, the first of them its sign."""
    half = 1 << (bits - 1)
    return (number + half) % (2 * half) - half
