"""What a Transformer passes from step to step: the memory of the source, and the state of the decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.hooks import CURRENT_HOOK
from ...masks import Mask, padding
from ...nn import Cache, ProjectedMemory
from ...nn.caches.base import check_rows
from .short_list import ListedWords


@dataclass(frozen=True, eq=False)
class TransformerMemory:
    """The source for cross-attention: keys and values of each decoder layer, lengths [N], and the padding mask.

    beams: how many consecutive rows of a batch [B], B = N · beams, share each of its rows. listed: the words that the
    sentences may become, where the model has a short list.
    """

    layers: tuple[ProjectedMemory, ...]
    lengths: Tensor
    mask: Mask
    beams: int = 1
    listed: ListedWords | None = None

    def reorder(self, rows: Tensor) -> TransformerMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Where each source is there equally often in a row, as those of the beams of a search are, it is kept once.
        Not so where calls of attention are hooked, as `record` does: there each beam is a sequence of its own.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths) * self.beams)
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
        sources, counts = torch.unique_consecutive(rows // self.beams, return_counts=True)
        shared = CURRENT_HOOK.get() is None and len(counts) > 0 and bool((counts == counts[0]).all())
        beams = int(counts[0]) if shared else 1
        sources = sources if beams > 1 else rows // self.beams
        if torch.equal(sources, torch.arange(len(self.lengths), device=sources.device)):
            return replace(self, beams=beams)
        lengths, layers = self.lengths[sources], tuple(layer.reorder(sources) for layer in self.layers)
        listed = None if self.listed is None else self.listed.reorder(sources)
        return TransformerMemory(layers, lengths, padding(lengths=lengths), beams, listed)


@dataclass(frozen=True, eq=False)
class TransformerState:
    """The state of a decoder between two steps: a cache of each layer, and the number of target tokens so far."""

    caches: tuple[Cache, ...]
    length: int = 0

    def reorder(self, rows: Tensor) -> TransformerState:
        """The state for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        return replace(self, caches=tuple(cache.reorder(rows) for cache in self.caches))
