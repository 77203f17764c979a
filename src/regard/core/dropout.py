"""Dropout by a counter-based hash of (seed, batch, head, row, column), the same in every kernel.

The same pair is dropped whichever kernel computes it, in whichever tile, forward and backward: nothing is stored.
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
    The probability is exact to 2⁻³².
    """

    probability: float
    seed: Tensor

    def keep_mask(self, shape: tuple[int, int, int, int], batch: slice, rows: slice, columns: slice) -> Tensor:
        """1 for the weights of a tile that are kept and 0 for those that are dropped: float32, (b, heads, m, n).

        shape: (batch, heads, M, N), of which `batch`, `rows` and `columns` choose the tile.
        """
        row, column = self.hashes(shape, batch, rows, columns)
        bits = _hash32_(row.unsqueeze(-1) + column)
        # Written back as numbers: a comparison that makes booleans, and a product with them, take five times as long.
        return torch.ge(bits, self.threshold, out=bits).float()

    def hashes(
        self, shape: tuple[int, int, int, int], batch: slice, rows: slice, columns: slice
    ) -> tuple[Tensor, Tensor]:
        """Hashes of rows and columns, int32, (b, heads, m) and (n,): a weight is kept where `_hash32_` of their sum is
        at least `threshold`.
        """
        device, (batches, heads, queries, keys) = self.seed.device, shape
        lead = torch.arange(batches * heads, device=device).view(batches, heads, 1)[batch]
        row = _hash64(_hash64(self.seed + lead) + torch.arange(queries, device=device)[rows])  # [B, H, m]
        column = _hash64(self.seed - 1 - torch.arange(keys, device=device)[columns])  # [n]
        return row.int(), column.int()

    @property
    def threshold(self) -> int:
        """The smallest int32 hash whose weight is kept."""
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
