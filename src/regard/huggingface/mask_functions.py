"""Transformers' mask functions read as masks: a closure is known by where it was defined, and by what it closes over.

Whatever is not known is evaluated, never guessed: through `masks.from_mod`, or by transformers itself.

Where the queries and the keys of one layer sit, as transformers counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from .. import masks
from ..errors import MaskError
from ..masks import Mask
from ..masks.base import And, Or
from ..masks.causal import Causal
from ..masks.window import Window


@dataclass(frozen=True)
class Frame:
    """M queries from position `query_offset` on, and N keys from `key_offset` on: a cache may have dropped the first.

    A static cache has keys beyond the last query, not yet written. Masks read here count from the first key that is
    there: keys sit at 0..N-1, queries at first..last.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of a mask over it: (batch, 1, M, N), the same for all heads."""
        return self.batch, 1, self.queries, self.keys

    @property
    def first(self) -> int:
        """The position of the first query, where the first key has position 0."""
        return self.query_offset - self.key_offset

    @property
    def last(self) -> int:
        """The position of the last query, where the first key has position 0."""
        return self.first + self.queries - 1

    @property
    def query_positions(self) -> Tensor | None:
        """Positions of the queries, (M,); None where they are the last M of the keys, as attention takes it."""
        if self.last == self.keys - 1:
            return None
        return torch.arange(self.first, self.last + 1, device=self.device)


MaskFunction = Callable[..., Any]
"""(batch, head, query position, key position) -> bool, as transformers.masking_utils has them."""

EVERYTHING = masks.window()


def read(function: MaskFunction, frame: Frame) -> Mask:
    """The mask that a mask function of transformers stands for, over the positions of a frame.

    What the frame makes certain is left out: `causal()` says nothing of a query that sits at the last key.
    """
    reader = _READERS.get(_origin(function))
    mask = None if reader is None else reader(_closure(function), frame)
    return evaluated(function, frame) if mask is None else mask


def evaluated(function: MaskFunction, frame: Frame) -> Mask:
    """The mask of a function that is not known: asked about its pairs, as transformers would."""
    offset = frame.key_offset

    def counted_from_the_first_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(batch, head, query + offset, key + offset)

    for batch in (None, frame.batch):
        try:
            return masks.from_mod(counted_from_the_first_key, batch=batch)
        except MaskError:
            continue  # it reads the number in the batch, or cannot be asked about one pair
    from transformers.masking_utils import sdpa_mask

    pairs = sdpa_mask(
        batch_size=frame.batch,
        q_length=frame.queries,
        kv_length=frame.keys,
        q_offset=frame.query_offset,
        kv_offset=frame.key_offset,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=True,
        device=frame.device,
    )
    return masks.where(keep=pairs)


def existing(tokens: Tensor, frame: Frame) -> Mask:
    """The mask of keys that exist, from bool (batch, length) over all positions, where True = token."""
    tokens = tokens[:, frame.key_offset : frame.key_offset + frame.keys]
    if (missing := frame.keys - tokens.shape[-1]) > 0:
        tokens = torch.nn.functional.pad(tokens, (0, missing))  # keys not yet written
    return EVERYTHING if bool(tokens.all()) else masks.from_huggingface(tokens)


def ends_at_the_query(mask: Mask) -> bool:
    """Whether no query attends to a key later than itself, for certain."""
    match mask:
        case Causal():
            return True
        case Window(after=after):
            return after == 0
        case And(left=left, right=right):
            return ends_at_the_query(left) or ends_at_the_query(right)
        case Or(left=left, right=right):
            return ends_at_the_query(left) and ends_at_the_query(right)
    return False


def both(parts: Sequence[Mask]) -> Mask:
    """All masks at once."""
    parts = [part for part in parts if part != EVERYTHING]
    return reduce(and_, parts) if parts else EVERYTHING


def either(parts: Sequence[Mask]) -> Mask:
    """Any of the masks."""
    return EVERYTHING if EVERYTHING in parts else reduce(or_, parts)


def _origin(function: MaskFunction) -> str:
    """The name under which transformers defines a function; nothing for any other."""
    here = getattr(function, "__module__", None) == "transformers.masking_utils"
    return getattr(function, "__qualname__", "").replace(".<locals>", "") if here else ""


def _closure(function: MaskFunction) -> dict[str, Any]:
    """What a function closes over, by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _causal(_: dict[str, Any], frame: Frame) -> Mask:
    return EVERYTHING if frame.first >= frame.keys - 1 else masks.causal()


def _sliding(closure: dict[str, Any], frame: Frame) -> Mask:
    # key > query - W: W keys with the query's own, so W - 1 before it.
    return _window(closure["sliding_window"] - 1, None, frame)


def _sliding_both_ways(closure: dict[str, Any], frame: Frame) -> Mask:
    # |query - key| <= W: W on each side of the query's own.
    return _window(closure["sliding_window"], closure["sliding_window"], frame)


def _window(before: int, after: int | None, frame: Frame) -> Mask:
    if before < 0:
        return ~EVERYTHING  # a window of no keys, which configurations have that use none
    return masks.window(
        None if before >= frame.last else before,
        None if after is None or after >= frame.keys - 1 - frame.first else after,
    )


def _chunked(closure: dict[str, Any], frame: Frame) -> Mask | None:
    end = frame.key_offset + max(frame.keys, frame.last + 1)
    left = closure["left_padding"].unsqueeze(-1)
    chunks = (torch.arange(end, device=frame.device) - left) // closure["chunk_size"]
    return _documents(chunks, frame)


def _blockwise(closure: dict[str, Any], frame: Frame) -> Mask | None:
    ids = closure["block_sequence_ids"]
    blocks = _documents(ids, frame)
    if blocks is None:
        return None
    return both([blocks, existing(ids >= 0, frame)])  # -1 is no block


def _packed(closure: dict[str, Any], frame: Frame) -> Mask | None:
    return _documents(closure["packed_sequence_mask"], frame)


def _padding(closure: dict[str, Any], frame: Frame) -> Mask:
    return existing(closure["padding_mask"], frame)


def _documents(ids: Tensor, frame: Frame) -> Mask | None:
    """Pairs of equal ids, (batch, length) over all positions, where each position has one."""
    ids = ids[:, frame.key_offset :]
    if frame.first < 0 or ids.shape[-1] < max(frame.keys, frame.last + 1):
        return None
    return EVERYTHING if bool((ids == ids[:, :1]).all()) else masks.documents(ids)


def _all_of(closure: dict[str, Any], frame: Frame) -> Mask:
    functions = closure["mask_functions"]
    packed = next((_closure(function) for function in functions if _origin(function) == _PACKED), None)
    parts = []
    for function in functions:
        mask = _remapped(function, packed, frame) if packed and _origin(function) == _REMAPPED else None
        parts.append(read(function, frame) if mask is None else mask)
    return both(parts)


def _any_of(closure: dict[str, Any], frame: Frame) -> Mask:
    return either([read(function, frame) for function in closure["mask_functions"]])


def _remapped(function: MaskFunction, packed: dict[str, Any], frame: Frame) -> Mask | None:
    """A function of positions within the documents, joined by & with the documents themselves.

    Where positions run on by 1 in every document, a distance within one is the same in both counts: so a mask that
    asks for distances alone may count from the first key.
    """
    closure, documents = _closure(function), packed["packed_sequence_mask"]
    within, positions = documents.diff(dim=-1) == 0, closure["position_ids"].diff(dim=-1) == 1
    runs = bool((documents.diff(dim=-1) >= 0).all()) and bool((positions | ~within).all())
    inner = read(closure["mask_function"], frame)
    return inner if runs and inner.by_distance else None


_PACKED = "packed_sequence_mask_function.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.inner_mask"

_READERS: dict[str, Callable[[dict[str, Any], Frame], Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda closure, frame: EVERYTHING,
    "sliding_window_overlay.inner_mask": _sliding,
    "sliding_window_bidirectional_overlay.inner_mask": _sliding_both_ways,
    "chunked_overlay.inner_mask": _chunked,
    "blockwise_overlay.inner_mask": _blockwise,
    "padding_mask_function.inner_mask": _padding,
    _PACKED: _packed,
    "and_masks.and_mask": _all_of,
    "or_masks.or_mask": _any_of,
}
