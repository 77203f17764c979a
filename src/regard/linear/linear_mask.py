"""The masks that linear attention can take: causal, padding, documents, and their intersections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from ..core.grid import Grid
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, MaskError
from ..masks import Mask, as_mask
from ..masks.base import And, Not
from ..masks.causal import Causal
from ..masks.documents import Documents
from ..masks.padding import Padding
from ..masks.prefix import Prefix, PrefixPerBatch
from ..masks.tensor_mask import TensorMask

SUPPORTED = (
    "Linear attention sums over keys before any query is known, so it takes masks.causal(), masks.padding(lengths), "
    "masks.where(keep=keys) with keys (batch, 1, 1, N) that are the same for all queries, masks.documents(ids) with "
    "one id for each position, whatever the head, and these joined by &. regard.attention takes any mask"
)


@dataclass(frozen=True, eq=False)
class LinearMask:
    """A mask taken apart: whether it is causal, the masks of keys alone, and the documents."""

    causal: bool = False
    of_keys: tuple[Mask, ...] = ()
    documents: Documents | None = None

    def keep(self, grid: Grid) -> Tensor | None:
        """Which keys exist, for a grid of one query: bool, (..., N) or with heads (..., heads, N); None for all."""
        kept = None
        for mask in self.of_keys:
            keys = mask.evaluate(grid)
            kept = keys if kept is None else kept & keys
        return None if kept is None else kept.squeeze(-2)

    def keep_at(self, positions: Tensor) -> Tensor | None:
        """Which keys at these positions, (N,) or (batch, N), exist: bool, (N,) or (batch, 1 or heads, N)."""
        return self.keep(Grid(positions[..., -1:], positions)) if positions.shape[-1] else None


def read_mask(mask: Mask | Tensor | None, causal: bool) -> LinearMask:
    """Take a mask apart; a bool tensor is one of keys, with a query axis of size 1.

    Raises:
        MaskError: a mask that linear attention cannot take, by its name.
    """
    parts = LinearMask(causal)
    if mask is None:
        return parts
    for part in _intersected(mask_of_keys(mask)):
        if isinstance(part, Causal):
            parts = replace(parts, causal=True)
        elif isinstance(part, Documents) and part.heads == 1 and parts.documents is None:
            parts = replace(parts, documents=part)
        elif _is_of_keys(part):
            parts = replace(parts, of_keys=(*parts.of_keys, part))
        else:
            raise MaskError(f"{part!r} is no mask for linear attention. {SUPPORTED}")
    return parts


def mask_of_keys(mask: Mask | Tensor) -> Mask:
    """The mask itself, or that of a bool tensor of keys, (N,) or with a query axis of size 1."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return TensorMask(mask if mask.ndim > 1 else mask.reshape(1, -1))
    return as_mask(mask)


def _intersected(mask: Mask) -> Iterator[Mask]:
    """The masks joined by &."""
    if isinstance(mask, And):
        yield from _intersected(mask.left)
        yield from _intersected(mask.right)
    else:
        yield mask


def _is_of_keys(mask: Mask) -> bool:
    """Whether a mask is the same for all queries."""
    if isinstance(mask, Not):
        return _is_of_keys(mask.mask)
    if isinstance(mask, TensorMask):
        return mask.pairs.shape[-2] == 1
    return isinstance(mask, Padding | Prefix | PrefixPerBatch)


def mask_at_positions(mask: Mask | Tensor | None, positions: Tensor, causal: bool) -> Mask | None:
    """The same mask for keys at these positions, (N,) or (batch, N), as one for keys at 0..N-1.

    Raises:
        MaskError: a mask that linear attention cannot take.
        ConfigurationError: causal attention, and positions that do not increase.
    """
    parts = read_mask(mask, causal)
    in_order = parts.causal and parts.documents is None
    if in_order and positions.is_cpu and not under_transform() and bool((positions.diff(dim=-1) <= 0).any()):
        raise ConfigurationError(
            "positions do not increase along the sequence, and causal linear attention sums over keys in their order: "
            "sort the tokens by position, or tell several texts apart by masks.documents(ids)"
        )
    keep = parts.keep_at(positions)
    masks: list[Mask] = [Causal()] if parts.causal else []
    if keep is not None:
        masks.append(TensorMask(keep.unsqueeze(-2)))
    if parts.documents is not None:
        masks.append(Documents(parts.documents.ids_of(positions)))
    return reduce(and_, masks) if masks else None
