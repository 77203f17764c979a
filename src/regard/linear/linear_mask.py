"""The masks that linear attention can take: causal, padding, documents, and their intersections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ..core.grid import Grid
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, MaskError, ShapeError
from ..masks import Mask, as_mask
from ..masks.base import And, Not
from ..masks.causal import Causal
from ..masks.documents import Documents
from ..masks.padding import Padding
from ..masks.prefix import Prefix, PrefixPerBatch
from ..masks.tensor_mask import TensorMask

SUPPORTED = (
    "Linear attention sums over keys before any query is known, so it takes masks.causal(), masks.padding(lengths), "
    "masks.where(keep=keys) with keys (batch, 1, 1, N) that are the same for all queries, masks.documents(ids), and "
    "these joined by &. regard.attention takes any mask"
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
        elif isinstance(part, Documents) and parts.documents is None:
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


@dataclass(frozen=True, eq=False)
class DocumentBatches:
    """The documents of a batch of sequences as rows of new batches, in each of which all have a similar length.

    indices: for each new batch (documents, width), the positions of its tokens in the merged axis batch · N.
    exists: likewise bool, False after the end of a document. order: where each of the batch · N tokens is among those
    of all new batches that exist.
    """

    indices: Sequence[Tensor]
    exists: Sequence[Tensor]
    order: Tensor

    @classmethod
    def from_ids(cls, ids: Tensor) -> DocumentBatches:
        """The documents of ids (batch, N): in each sequence, equal ids are one document."""
        batch, length = ids.shape
        by_id = ids.argsort(dim=-1, stable=True)
        ranked = ids.gather(-1, by_id)
        first = torch.ones_like(ranked, dtype=torch.bool)
        first[:, 1:] = ranked[:, 1:] != ranked[:, :-1]
        starts = first.flatten().nonzero().squeeze(-1)
        lengths = torch.cat([starts, starts.new_tensor([batch * length])]).diff()
        tokens = (by_id + torch.arange(batch, device=ids.device).unsqueeze(-1) * length).flatten()
        indices, exists = [], []
        widths = lengths.double().log2().ceil()  # lengths of one batch differ by less than a factor of 2
        for width in widths.unique():
            start, count = starts[widths == width, None], lengths[widths == width, None]
            offsets = torch.arange(int(count.max()), device=ids.device)
            exists.append(offsets < count)
            indices.append(tokens[start + offsets.minimum(count - 1)])
        found = [index[inside] for index, inside in zip(indices, exists, strict=True)]
        return cls(indices, exists, torch.cat(found).argsort() if found else tokens)

    def map(self, compute: Callable[..., Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        """The result of `compute(*tensors, exists)` for each batch of documents, put back in the original order.

        Shapes: tensors (batch, heads, N, ...), passed as (documents, heads, width, ...) with exists (documents, 1,
        width); results (documents, heads, width, Dv); the returned tensor is (batch, heads, N, Dv).
        """
        batch = next(tensor.shape[0] for tensor in tensors if tensor is not None)
        return self.join([compute(*rows, exists) for rows, exists in self.split(tensors)], batch)

    def split(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[list[Any], Tensor]]:
        """The rows of each batch of documents and their `exists`, in the shapes of `map`."""
        merged = [None if tensor is None else tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
        for index, exists in zip(self.indices, self.exists, strict=True):
            yield (
                [None if tensor is None else tensor[index].transpose(1, 2) for tensor in merged],
                exists.unsqueeze(1),
            )

    def join(self, results: Sequence[Tensor], batch: int) -> Tensor:
        """Results of each batch of documents, (documents, heads, width, Dv), in the original order."""
        rows = [result.transpose(1, 2)[exists] for result, exists in zip(results, self.exists, strict=True)]
        return torch.cat(rows)[self.order].unflatten(0, (batch, -1)).transpose(1, 2)


def document_batches(documents: Documents, value: Tensor) -> DocumentBatches:
    """The documents among keys with values (batch, heads, N, Dv).

    Raises:
        ShapeError: they are for another length or batch.
    """
    batch, length = value.shape[0], value.shape[2]
    ids = documents.ids.to(value.device)
    if ids.shape[-1] != length or ids.shape[:-1].numel() not in (1, batch):
        raise ShapeError(
            f"{documents!r} is for {ids.shape[-1]} positions and a batch of {ids.shape[:-1].numel()}, but there are "
            f"{length} keys and a batch of {batch}: linear attention needs one id for each key"
        )
    return DocumentBatches.from_ids(ids.reshape(-1, length).expand(batch, length))
