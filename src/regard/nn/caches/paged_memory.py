"""Memory for the keys and values of all layers of a model, in pages that sequences share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...core.cache_format import CacheFormat
from .layer_pages import CodePages, LayerHeads, LayerPages, NumberPages, check_page
from .page_pool import PagedSequence, PagePool

PAGE = 64
"""Tokens of a page: half of one is lost for each sequence; runs of so many keys are read at nearly the full rate."""


class PagedMemory:
    """Keys and values of all layers and sequences: of a page of a sequence those of `size` tokens, in every layer.

    On a CPU the system provides memory for what is written only, so that unused pages cost nothing.

    Args:
        layers: what each stores.
        pages: how many there are.
        size: tokens of a page.
        cache_format: how keys and values are stored, as codes of 8 or 4 bits; without it as they are.

    Raises:
        ConfigurationError: numbers that are no integers of at least 1; a format with which tokens are not stored each
            by itself, or another size than 64 with one.
        ShapeError: heads that the format cannot store.

    >>> memory = PagedMemory([LayerHeads(2, 8, 8)], pages=4, size=16)
    >>> sequence = memory.sequence("first")
    >>> sequence.extend(range(20))
    >>> memory.layers[0].keys.shape, len(sequence.pages), memory.nbytes_of(sequence)
    (torch.Size([1, 2, 64, 8]), 2, 4096)
    """

    def __init__(
        self,
        layers: Sequence[LayerHeads],
        pages: int,
        size: int = PAGE,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        cache_format: CacheFormat | None = None,
    ) -> None:
        self.pool = PagePool(pages, size)
        if cache_format is not None:
            check_page(size)

        def memory(layer: LayerHeads) -> LayerPages:
            if cache_format is None:
                return NumberPages(layer, pages * size, dtype, device)
            return CodePages(cache_format, layer, pages * size, dtype, device)

        self.layers = tuple(memory(layer) for layer in layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self.layers[0].keys.device

    def nbytes_of(self, sequence: PagedSequence) -> int:
        """Bytes of the pages that a sequence holds."""
        return len(sequence.pages) * self.nbytes // self.pool.count

    def sequence(self, name: object) -> PagedSequence:
        """A sequence without tokens; errors tell how many pages it holds, by its name."""
        return self.pool.sequence(name)
