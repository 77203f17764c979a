"""Padding masks: per sequence of a batch, the number of keys that exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core.tensor_memo import copy_on
from ..core.torch_modes import under_transform
from ..errors import MaskError
from .base import Kept, Mask, Pairs
from .index_checks import whole_numbers


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Key position < length, per sequence of the batch."""

    lengths: Tensor

    def keep(self, grid: Pairs) -> Kept:
        return keys_before(self.lengths, grid)

    def __repr__(self) -> str:
        return f"padding(lengths={self.lengths.tolist()})"


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Pairs whose key lies within its sequence: *key position < length*.

    Lengths count from the start: keys 0..length-1 exist, and padding is on the right. For padding on the left, where
    the last `length` of N keys exist, the mask is `where(keep=torch.arange(N) >= (N - lengths)[:, None, None, None])`;
    the `lengths` of `LanguageModel.generate` count from the end, for padding on the left.

    Shapes: lengths is (*batch), a tensor or a list of whole numbers >= 0; a length of 0 leaves rows that attend to
    nothing (output 0).

    A tensor is not copied: each call sees what was written to it, as in `where`. Anything else is.

    Raises:
        MaskError: lengths are not whole numbers, or one is negative.

    >>> from regard import masks
    >>> masks.padding([1, 3]).dense(1, 3).int()
    tensor([[[[1, 0, 0]]],
            [[[1, 1, 1]]]], dtype=torch.int32)
    """
    return Padding(checked_lengths("padding", "lengths", lengths))


def checked_lengths(mask: str, name: str, lengths: Tensor | Sequence[int]) -> Tensor:
    """Whole numbers of at least 0, one per sequence of the batch; `mask` and `name` are for the message."""
    tokens = "A bool tensor of tokens that exist goes to masks.where(keep=tensor[..., None, None, :])"
    counts = whole_numbers(mask, name, lengths, instead=tokens)
    if counts.numel() and not under_transform() and int(counts.min()) < 0:
        raise MaskError(f"{mask} needs {name} of at least 0; the smallest here is {int(counts.min())}")
    return counts


def keys_before(lengths: Tensor, grid: Pairs) -> Kept:
    """Key position < length, where lengths are (*batch)."""
    return grid.key < grid.per_batch(copy_on(lengths, grid.device)[..., None, None])
