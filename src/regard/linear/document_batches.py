"""The documents of packed sequences as batches of rows of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.finite import waits
from ..core.tensor_memo import copy_on, memoize_by_tensors
from ..errors import ShapeError
from ..masks.documents import Documents


@dataclass(frozen=True, eq=False)
class DocumentBatches:
    """The documents of a batch of sequences as rows of new batches, in each of which all have a similar length.

    indices: for each new batch (documents, width), the positions of its tokens in the merged axis batch · N.
    exists: likewise bool, False after the end of a document. order: where each of the batch · N tokens is among all
    tokens of all new batches.
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
        if not indices:
            return cls(indices, exists, tokens)
        all_exist = torch.cat([inside.flatten() for inside in exists])
        found = torch.cat([index.flatten() for index in indices])[all_exist]
        return cls(indices, exists, all_exist.nonzero().squeeze(-1)[found.argsort()])

    def to(self, device: torch.device) -> DocumentBatches:
        """The same on a device, for which the host does not wait."""
        indices, exists = (
            [each.to(device, non_blocking=True) for each in part] for part in (self.indices, self.exists)
        )
        return DocumentBatches(indices, exists, self.order.to(device, non_blocking=True))

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
        rows = torch.cat([result.transpose(1, 2).flatten(0, 1) for result in results])
        return rows[self.order].unflatten(0, (batch, -1)).transpose(1, 2)


def document_batches(documents: Documents, value: Tensor) -> DocumentBatches:
    """The documents among keys with values (batch, heads, N, Dv).

    Raises:
        ShapeError: they are for another length or batch.
    """
    batch, length = value.shape[0], value.shape[2]
    ids = documents.ids
    if ids.shape[-1] != length or ids.shape[:-1].numel() not in (1, batch):
        raise ShapeError(
            f"{documents!r} is for {ids.shape[-1]} positions and a batch of {ids.shape[:-1].numel()}, but there are "
            f"{length} keys and a batch of {batch}: linear attention needs one id for each key"
        )

    def found() -> DocumentBatches:
        on_host = copy_on(ids, torch.device("cpu")) if waits(value) else ids.to(value.device)
        batches = DocumentBatches.from_ids(on_host.reshape(-1, length).expand(batch, length))
        return batches.to(value.device) if waits(value) else batches

    what = "document batches", batch, length, value.device
    return memoize_by_tensors((ids,), what, found) if waits(value) else found()
