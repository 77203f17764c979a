"""Memory for the keys and values of all layers of a model, in pages that sequences share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .page_pool import PagedSequence, PagePool

PAGE = 64
"""Tokens of a page: half of one is lost for each sequence; runs of so many keys are read at nearly the full rate."""


@dataclass(frozen=True)
class LayerHeads:
    """What a layer stores of each token: so many heads of keys and values."""

    heads: int
    key_dim: int
    value_dim: int


class PagedMemory:
    """Keys and values of all layers and sequences: of a page of a sequence those of `size` tokens, in every layer.

    On a CPU the system provides memory for what is written only, so that unused pages cost nothing.

    Shapes: keys[layer] (key heads, pages · size, key dim), values[layer] (key heads, pages · size, value dim).

    Args:
        layers: what each stores.
        pages: how many there are.
        size: tokens of a page.

    Raises:
        ConfigurationError: numbers that are no integers of at least 1.

    >>> memory = PagedMemory([LayerHeads(2, 8, 8)], pages=4, size=16)
    >>> sequence = memory.sequence("first")
    >>> sequence.extend(range(20))
    >>> memory.keys[0].shape, len(sequence.pages), memory.nbytes_of(sequence)
    (torch.Size([2, 64, 8]), 2, 4096)
    """

    def __init__(
        self,
        layers: Sequence[LayerHeads],
        pages: int,
        size: int = PAGE,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.pool = PagePool(pages, size)
        rows = pages * size

        def memory(heads: int, dim: int) -> Tensor:
            return torch.empty(heads, rows, dim, dtype=dtype, device=device)

        self.keys = tuple(memory(layer.heads, layer.key_dim) for layer in layers)
        self.values = tuple(memory(layer.heads, layer.value_dim) for layer in layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.keys[0].device

    def nbytes_of(self, sequence: PagedSequence) -> int:
        """Bytes of the pages that a sequence holds."""
        return len(sequence.pages) * self.nbytes // self.pool.count

    def sequence(self, name: object) -> PagedSequence:
        """A sequence without tokens; errors tell how many pages it holds, by its name."""
        return self.pool.sequence(name)
