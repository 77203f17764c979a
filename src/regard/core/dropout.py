"""Dropout of attention weights as a hash of the seed, the batch, the head and the two positions.

Nothing is stored: any kernel drops the same weights, in any tile, forward and backward. A shard of a longer sequence,
with its positions in the whole and the same seed, drops the weights that the whole sequence would. `regard.ring` takes
the seed of rank 0 (`agreed_problem` in ring/ring_attention.py); elsewhere `torch.manual_seed` before the call on each
shard has that effect. A shard of heads does so with `head_block`, which `with_heads` in ring/head_exchange.py sets. A
shard of a batch does not: head numbers are counted from 0 in each call.

The hash is computed in three places, which tests hold together: here; in C, `dropout_mask` of `cpu/tile.h`, from the
hashes of rows and columns that are computed here; and in the oracle's `dropout_keeps`, with Python's integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Odd constants of splitmix64 (Steele, Lea and Flood 2014) and of a 32-bit mixer; int64 and int32 wrap around.
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_MIX32 = (0x7FEB352D, 0x846CA68B - 2**32)


@dataclass(frozen=True, eq=False, slots=True)
class Dropout:
    """Each weight is dropped with `probability`; the others are divided by 1 - probability.

    seed: an int64 tensor of shape (), drawn from torch's generator, so that `torch.manual_seed` repeats it.
    The probability is exact to 2⁻³². head_count: head numbers are taken modulo it, where a problem is a part of another
    one and has the batches and heads of that one several times over (`decomposed`); None: as they are. head_block:
    where a problem has some heads of a larger one, (number, first, all): how many it has of each batch, the first of
    them, and how many the larger one has.
    """

    probability: float
    seed: Tensor
    head_count: int | None = None
    head_block: tuple[int, int, int] | None = None

    def dropout_mask(self, head_numbers: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The mask of a tile, float32 (b, heads, m, n): 0 where the weight is dropped, 1 where it is not.

        Shapes, all int64: head_numbers (b, heads, 1), batch · heads + head for each head of the whole problem;
        queries (m,) or (b, 1, m) and keys (n,) or (b, 1, n), their positions in the whole sequence.
        """
        return self._kept(self.pair_hashes(head_numbers, queries, keys))

    def listed_mask(self, head_numbers: Tensor, queries: Tensor, keys: Tensor, numbers: Tensor) -> Tensor:
        """The mask at listed keys alone, (b, heads, m, K); numbers (b or 1, heads or 1, m, K): of keys among (n,)."""
        rows, columns = self.hashes(head_numbers, queries, keys)
        return self._kept(_hash32_(rows.unsqueeze(-1) + columns[numbers]))

    def _kept(self, bits: Tensor) -> Tensor:
        """1 where a weight is not dropped, by the hashes of pairs, which are overwritten."""
        # Written back as numbers: a comparison that makes booleans, and a product with them, take five times as long.
        return torch.ge(bits, self.threshold, out=bits).float()

    def pair_hashes(self, head_numbers: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """int32 hashes of the pairs of a tile, (b, heads, m, n); arguments are those of `dropout_mask`."""
        rows, columns = self.hashes(head_numbers, queries, keys)
        return _hash32_(rows.unsqueeze(-1) + columns.unsqueeze(-2))

    def hashes(self, head_numbers: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """int32 hashes of the rows, (b, heads, m), and of the columns, (n,) or (b, 1, n), of a tile.

        Arguments are those of `dropout_mask`. A weight is dropped where `_hash32_(row hash + column hash)` is below
        `threshold`.
        """
        numbers = head_numbers if self.head_count is None else head_numbers % self.head_count
        if self.head_block is not None:
            number, first, every = self.head_block
            numbers = numbers // number * every + first + numbers % number
        return _hash64(_hash64(self.seed + numbers) + queries).int(), _hash64(self.seed - 1 - keys).int()

    @property
    def threshold(self) -> int:
        """The smallest int32 hash whose weight is not dropped."""
        return round(self.probability * 2**32) - 2**31


def _hash64(number: Tensor) -> Tensor:
    """splitmix64: 64 bits, each of which depends on each bit of the number."""
    number = number * _STEP
    number = (number ^ (number >> 30)) * _MIX[0]
    number = (number ^ (number >> 27)) * _MIX[1]
    return number ^ (number >> 31)


def _hash32_(number: Tensor) -> Tensor:
    """A 32-bit mixer, in place: the only part that is computed for each pair."""
    number ^= number >> 16
    number *= _MIX32[0]
    number ^= number >> 15
    number *= _MIX32[1]
    return number


@dataclass(frozen=True, eq=False, slots=True)
class DropoutHashes:
    """Dropout of weights: those whose mixed sum of the hashes of row and column is below the threshold are 0.

    Shapes: rows (B, H, M), columns (N,), int32, by `Dropout.hashes`. keep_probability: what
    the other weights are divided by.
    """

    rows: Tensor
    columns: Tensor
    threshold: int
    keep_probability: float
