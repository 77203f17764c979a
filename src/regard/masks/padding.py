"""Padding: sequences of a batch end at their own lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MaskError
from ..tiles import Grid
from .base import Mask


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Key position < length, for each sequence of the batch."""

    lengths: Tensor

    def keep(self, grid: Grid) -> Tensor:
        ends = grid.per_batch(self.lengths.to(grid.key_positions.device)[..., None, None])
        return grid.key < ends

    def __repr__(self) -> str:
        return f"padding(lengths={self.lengths.tolist()})"


def padding(*, lengths: Tensor | Sequence[int]) -> Mask:
    """Pairs whose key lies within its sequence: *key position < length*, so keys 0..length-1 exist.

    Shapes: lengths is (*batch), whole numbers >= 0; a length of 0 leaves rows that attend to nothing (output 0).

    Raises:
        MaskError: lengths are not whole numbers, or one is negative.

    >>> from regard import masks
    >>> masks.padding(lengths=[1, 3]).dense(1, 3).int()
    tensor([[[[1, 0, 0]]],
            [[[1, 1, 1]]]], dtype=torch.int32)
    """
    try:
        counts = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise MaskError(f"padding needs whole numbers as lengths; it was given {lengths!r}") from None
    if not counts.numel():
        counts = counts.long()  # no sequences at all: an empty list says nothing of its type
    if counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise MaskError(
            f"padding needs whole numbers as lengths; these are {counts.dtype}. A bool tensor of tokens that exist "
            "goes to masks.where(keep=tensor[..., None, None, :])"
        )
    if counts.numel() and int(counts.min()) < 0:
        raise MaskError(f"padding needs lengths of at least 0; the smallest here is {int(counts.min())}")
    return Padding(counts)
