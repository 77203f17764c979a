"""Global tokens: positions that see everything and are seen by everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MaskError
from .base import Kept, Mask, Pairs
from .numbers import whole_numbers


@dataclass(frozen=True, repr=False)
class GlobalTokens(Mask):
    """The key's or the query's position is among the indices."""

    indices: tuple[int, ...]

    def keep(self, grid: Pairs) -> Kept:
        return grid.by_query(self._chosen) | grid.by_key(self._chosen)

    def _chosen(self, positions: Tensor) -> Tensor:
        return torch.isin(positions, torch.tensor(self.indices, dtype=torch.int64, device=positions.device))

    def __repr__(self) -> str:
        return f"global_tokens({list(self.indices)})"


def global_tokens(indices: Tensor | Sequence[int]) -> Mask:
    """Pairs with a chosen token on either side: *query position or key position among the indices*.

    Longformer's global attention (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), which is symmetric, and
    BigBird's (Zaheer et al. 2020, arXiv 2007.14062, section 2, internal construction).

    Shapes: indices is (G,), whole numbers >= 0.

    Raises:
        MaskError: indices are not one axis of whole numbers, or one is negative.

    >>> from regard import masks
    >>> masks.global_tokens([1]).dense(3, 3).int()
    tensor([[0, 1, 0],
            [1, 1, 1],
            [0, 1, 0]], dtype=torch.int32)
    """
    numbers = whole_numbers("global_tokens", "indices", indices)
    if numbers.ndim != 1:
        raise MaskError(f"global_tokens needs indices of shape (G,); these have the shape {tuple(numbers.shape)}")
    if numbers.numel() and int(numbers.min()) < 0:
        raise MaskError(
            f"global_tokens needs positions of at least 0; the smallest here is {int(numbers.min())}. The last of n "
            "positions is n - 1"
        )
    return GlobalTokens(tuple(numbers.tolist()))
