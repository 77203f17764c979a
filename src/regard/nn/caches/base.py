"""The protocol of decoding caches: `append`, `reorder`, `evict`, `next_position` and `nbytes`."""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from ...core.torch_modes import under_transform
from ...errors import DtypeError, ShapeError
from ...masks import Mask


class Cache(Protocol):
    """State of one self-attention layer during decoding, as an immutable value: every method returns a new cache.

    `KVCache` stores keys and values of all positions, so its size grows with the sequence. An operator whose state has
    a constant size, such as linear attention (S_t = S_{t-1} + φ(k_t) v_tᵀ), implements the same five members. Derive
    from this class to inherit `next_positions`; `TransformerBlock` accepts any such cache for any layer that has
    `make_cache` and `step`.
    """

    @property
    def next_position(self) -> int | Tensor:
        """Default position of the next token: one number, or (batch,) where the sequences differ."""
        ...

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        ...

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> Self:
        """The cache after M more tokens, at the next positions or at the given ones.

        Shapes: keys (batch, key heads, M, key dim), values (batch, key heads, M, value dim), positions (M,) or
        (batch, M).
        """
        ...

    def reorder(self, rows: Tensor) -> Self:
        """The cache for these rows of the batch, in this order; rows may repeat, as in beam search.

        Shapes: rows (count,), integers in 0..batch-1, or bool (batch,).
        """
        ...

    def evict(self) -> Self:
        """The cache without entries that no future query can attend to; the cache itself where nothing is evicted."""
        ...

    def next_positions(self, count: int, device: torch.device | None = None) -> Tensor:
        """Default positions of the next `count` tokens: (count,), or (batch, count) where the sequences differ."""
        first = self.next_position
        if isinstance(first, Tensor):
            return torch.arange(count, device=device) + first.unsqueeze(-1)
        return torch.arange(first, first + count, device=device)


class KeyValueStore(Cache, Protocol):
    """A cache that softmax attention can read: it returns the stored keys and values, and their positions.

    `Attention` and `LatentAttention` accept any cache with these members.
    """

    @property
    def keys(self) -> Tensor:
        """(batch, key heads, N, key dim)."""
        ...

    @property
    def values(self) -> Tensor:
        """(batch, key heads, N, value dim)."""
        ...

    @property
    def positions(self) -> Tensor:
        """Positions of the keys, (N,) or (batch, N)."""
        ...

    @property
    def has_default_positions(self) -> bool:
        """Whether the keys are at positions 0..N-1."""
        ...

    @property
    def mask(self) -> Mask | None:
        """The mask that decides which keys are evicted; None if no key is ever evicted."""
        ...


def consecutive_positions(cache: KeyValueStore) -> range | None:
    """Positions of the keys where they are known to be consecutive, up to that before the next one; None where not.

    None while a graph is traced, which would hold for this range alone.
    """
    return None if torch.compiler.is_compiling() else getattr(cache, "consecutive_positions", None)


def has_known_positions(cache: KeyValueStore) -> bool:
    """Whether the positions of the keys are numbers, which no tensor has to hold."""
    return cache.has_default_positions or consecutive_positions(cache) is not None


def attended_positions(cache: KeyValueStore, new: Tensor | None) -> tuple[Tensor | None, Tensor | range | None]:
    """`query_positions` and `key_positions` of `regard.attention` for the last tokens of a cache, which are at `new`.

    None where they are the default: keys at 0..N-1, queries where the last keys are. Consecutive ones are a range, and
    `new` is not read.
    """
    if cache.has_default_positions:
        return None, None
    known = consecutive_positions(cache)
    return (new, cache.positions) if known is None else (None, known)


KEY_VALUE_MEMBERS = (
    *("append", "evict", "has_default_positions", "keys", "mask", "next_position", "next_positions", "positions"),
    *("reorder", "values"),
)
"""What layers of softmax attention use of a cache."""


def check_rows(rows: object, batch: int) -> None:
    """Check row indices of a batch: integers (count,) in 0..batch-1, or bool (batch,). Values are read on the CPU only.

    torch alone would count a negative row from the end, so that a wrong parent in a beam search would raise nothing.

    Raises:
        ShapeError, DtypeError: other shapes, dtypes or values.

    >>> check_rows(torch.tensor([1, 1, 0]), batch=2)
    """
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32, torch.bool):
        has = rows.dtype if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise DtypeError(f"rows need a tensor of whole numbers, torch.int64 for instance, or of bool; this is {has}")
    if rows.ndim != 1 or (rows.dtype == torch.bool and len(rows) != batch):
        needs = f"({batch},), as the batch has the size {batch}" if rows.dtype == torch.bool else "(count,)"
        raise ShapeError(f"rows have the shape {tuple(rows.shape)}; {rows.dtype} rows need {needs}")
    if rows.dtype == torch.bool or not rows.is_cpu or not len(rows) or under_transform():
        return
    least, most = (int(end) for end in rows.aminmax())
    if least < 0 or most >= batch:
        raise ShapeError(
            f"rows are in {least}..{most}, but the batch has the size {batch}: they need to be in 0..{batch - 1}"
        )
