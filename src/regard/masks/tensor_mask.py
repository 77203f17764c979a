"""Masks from bool tensors; the name of the argument, keep or ignore, defines the meaning of True."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tensor_memo import copy_on
from ..core.torch_modes import is_causal_bias
from ..errors import MaskError
from .base import Kept, Mask, Pairs


@dataclass(frozen=True, eq=False, repr=False)
class TensorMask(Mask):
    """The pairs where a tensor is True."""

    pairs: Tensor

    @property
    def by_position(self) -> bool:
        return False

    def keep(self, grid: Pairs) -> Kept:
        return grid.cut(copy_on(self.pairs, grid.device))

    def __repr__(self) -> str:
        return f"where(keep=<bool {tuple(self.pairs.shape)}>)"


def where(*, keep: Tensor | None = None, ignore: Tensor | None = None) -> Mask:
    """Pairs selected by a bool tensor: `keep` has True = attend, `ignore` has True = leave out. Pass one of the two.

    Shapes: broadcastable to the weights, (..., heads, M, N); (M, N) or (N,) apply to every batch and head. A mask of
    keys per sequence, in a batch with heads, is (batch, 1, 1, N).

    `keep` is not copied: each call sees what was written to it, also through an array of NumPy that shares its memory;
    but not what was written through `.data` or by another process, which torch does not count. `ignore` is copied, as
    it is inverted: no later write is seen.

    Raises:
        MaskError: neither or both are passed, or the tensor is not bool (numbers added to the scores are a bias).

    >>> import torch
    >>> from regard import masks
    >>> masks.where(ignore=torch.tensor([False, True])).dense(2, 2).int()
    tensor([[1, 0],
            [1, 0]], dtype=torch.int32)
    """
    if (keep is None) == (ignore is None):
        raise MaskError(
            "where() takes exactly one of keep (True = attend) and ignore (True = leave out); "
            f"it was given {'neither' if keep is None else 'both'}"
        )
    name, pairs = ("keep", keep) if keep is not None else ("ignore", ignore)
    if is_causal_bias(pairs):
        raise MaskError(f"{name} needs a bool tensor; a CausalBias of torch is read by masks.from_sdpa(bias)")
    if not isinstance(pairs, Tensor) or pairs.dtype != torch.bool:
        has = f"{pairs.dtype}" if isinstance(pairs, Tensor) else f"a {type(pairs).__name__}"
        raise MaskError(
            f"{name} needs a bool tensor; it is {has}. For 0/1 numbers give {name}=tensor.bool(); numbers that are "
            "added to the scores go to bias="
        )
    if pairs.ndim < 2:
        pairs = pairs.reshape(1, -1)
    return TensorMask(pairs if name == "keep" else ~pairs)
