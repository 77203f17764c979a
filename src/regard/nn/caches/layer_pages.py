"""What the pages of one layer hold: keys and values of all sequences, as numbers or as codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...core.cache_format import CacheFormat
from ...core.packed_rows import CodeRows, KeyCodes, PackedHeads, PackedTensor, ValueCodes
from ...core.packing import BLOCK
from ...errors import ConfigurationError
from ...kernels.packed_inputs import store
from .page_pool import PagedSequence


@dataclass(frozen=True)
class LayerHeads:
    """What a layer stores of each token: so many heads of keys and values."""

    heads: int
    key_dim: int
    value_dim: int


class LayerPages(ABC):
    """Keys and values of one layer in rows of a memory; a page is so many neighbouring rows.

    keys, values: all rows, (1, key heads, rows, ·).
    """

    keys: Tensor
    values: Tensor

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all rows."""

    @abstractmethod
    def write(self, slots: Tensor, keys: Tensor, values: Tensor, known: dict[object, Any]) -> None:
        """Store the keys and values of tokens, (1, key heads, T, ·), in the rows `slots`, (T,).

        known: what the layers of a step have in common, which the first of them adds to.
        """

    @abstractmethod
    def of(self, sequence: PagedSequence, first: int, known: dict[object, Any]) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence from a position on, (1, key heads, N, ·)."""


class NumberPages(LayerPages):
    """Rows of numbers, (key heads, rows, ·): runs of neighbouring pages are read as one."""

    def __init__(self, layer: LayerHeads, rows: int, dtype: torch.dtype | None, device: torch.device | None) -> None:
        self.keys = torch.empty(1, layer.heads, rows, layer.key_dim, dtype=dtype, device=device)
        self.values = torch.empty(1, layer.heads, rows, layer.value_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, known: dict[object, Any]) -> None:
        self.keys.index_copy_(2, slots, keys)
        self.values.index_copy_(2, slots, values)

    def of(self, sequence: PagedSequence, first: int, known: dict[object, Any]) -> tuple[Tensor, Tensor]:
        key = sequence, first
        if key not in known:
            runs = list(sequence.runs(first, len(sequence)))
            known[key] = slice(runs[0][0], sum(runs[0]))
            if len(runs) > 1:
                rows = torch.cat([torch.arange(begin, begin + count) for begin, count in runs])
                known[key] = rows.to(self.keys.device)
        return self.keys[:, :, known[key]], self.values[:, :, known[key]]


class CodePages(LayerPages):
    """Rows of codes, a page for each block: `decode` reads those of a sequence where they are.

    Raises:
        ConfigurationError: a format whose codes are made for 64 tokens at once; numbers as they are.
        DtypeError, ShapeError: heads that the format cannot store.
    """

    def __init__(
        self,
        format_: CacheFormat,
        layer: LayerHeads,
        rows: int,
        dtype: torch.dtype | None,
        device: torch.device | None,
    ) -> None:
        if format_.keys is None or format_.values is None or format_.by_blocks:
            raise ConfigurationError(
                f"pages cannot hold {format_}: they need codes of each token by itself, so neither by_channel nor "
                "newest, such as CacheFormat(); numbers as they are need no format"
            )
        self.heads = tuple(range(layer.heads))
        self.none = [
            torch.empty(1, layer.heads, 0, dim, dtype=dtype, device=device) for dim in (layer.key_dim, layer.value_dim)
        ]
        format_.check(*self.none)
        self.key_codes: CodeRows = KeyCodes.allocate(format_.keys, self.none[0], rows)
        self.value_codes: CodeRows = ValueCodes.allocate(format_.values, self.none[1], rows)
        self.keys, self.values = self._rows(0, rows, None)

    @property
    def nbytes(self) -> int:
        return self.key_codes.nbytes + self.value_codes.nbytes

    def write(self, slots: Tensor, keys: Tensor, values: Tensor, known: dict[object, Any]) -> None:
        if "runs" not in known:
            known["runs"] = _neighbours(slots.tolist())
        for token, slot, count in known["runs"]:
            store(self.key_codes, slot, keys[:, :, token : token + count])
            store(self.value_codes, slot, values[:, :, token : token + count])

    def of(self, sequence: PagedSequence, first: int, known: dict[object, Any]) -> tuple[Tensor, Tensor]:
        if sequence not in known:
            known[sequence] = torch.tensor(sequence.pages, dtype=torch.int64, device=self.key_codes.words.device)
        return self._rows(first, len(sequence), known[sequence])

    def _rows(self, first: int, end: int, pages: Tensor | None) -> tuple[PackedTensor, PackedTensor]:
        """Keys and values of some pages, or of all rows, from one on: views."""
        both = zip((self.key_codes, self.value_codes), self.none, strict=True)
        keys, values = (
            PackedTensor((PackedHeads(self.heads, codes.in_pages(pages), first, end, none),)) for codes, none in both
        )
        return keys, values


def _neighbours(slots: list[int]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring rows: the first token of each, its row, and how many there are."""
    begins = [0, *(number for number, (one, two) in enumerate(pairwise(slots), 1) if two != one + 1), len(slots)]
    return [(begin, slots[begin], end - begin) for begin, end in pairwise(begins) if begin < end]


def check_page(size: int) -> None:
    """Check that a page of so many tokens can hold codes.

    Raises:
        ConfigurationError: it is no block of them.
    """
    if size != BLOCK:
        raise ConfigurationError(f"pages of codes have {BLOCK} tokens each; these have {size}")
