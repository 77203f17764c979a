"""Convert mask functions of transformers to masks, recognised by qualified name and closure variables.

An unknown function is evaluated and never guessed: through `masks.from_mod`, or on all pairs by transformers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce, wraps
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
class MaskExtent:
    """Positions of M queries, from `query_offset` on, and N keys, from `key_offset` on, of one layer and call.

    The offsets are positions in the text. key_offset is above 0 where a cache has evicted the first keys; a static
    cache has keys after the last query, not yet written. Converted masks count from the first stored key: the keys are
    at 0..N-1, the queries at first_query..last_query.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask tensor: (batch, 1, M, N), the same for all heads."""
        return self.batch, 1, self.queries, self.keys

    @property
    def first_query(self) -> int:
        """Position of the first query, relative to the first key."""
        return self.query_offset - self.key_offset

    @property
    def last_query(self) -> int:
        """Position of the last query, relative to the first key."""
        return self.first_query + self.queries - 1

    @property
    def query_positions(self) -> range | None:
        """Positions of the queries, M of them; None where they are the last M key positions, the default of attention.

        A range, whose tiles are memoized: to see that the positions of a tensor are consecutive waits for its device.
        """
        return None if self.last_query == self.keys - 1 else range(self.first_query, self.last_query + 1)


MaskFunction = Callable[..., Any]
"""A function (batch, head, query position, key position) -> bool, as in transformers.masking_utils."""

EVERYTHING = masks.window()


def convert(function: MaskFunction, extent: MaskExtent) -> Mask:
    """The mask that is equal to a mask function of transformers over the positions of an extent.

    A function is known by its qualified name, in `_CONVERTERS`; any other, and one that they cannot convert, is given
    to `evaluate`. Parts that hold for all pairs are dropped: `causal()` where all queries are at the last key or later.
    """
    converter = _CONVERTERS.get(_qualified_name(function))
    mask = None if converter is None else converter(_closure(function), extent)
    return evaluate(function, extent) if mask is None else mask


def evaluate(function: MaskFunction, extent: MaskExtent) -> Mask:
    """The mask of an unknown function: `masks.from_mod`, or, if that refuses it, the tensor of all its pairs.

    A function that raises for the first pair may not for others: it becomes `from_mod` too, and attention raises.
    """
    offset = extent.key_offset

    @wraps(function)  # errors and pictures name the user's function
    def relative_to_first_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return function(batch, head, query + offset, key + offset)

    for batch in (None, extent.batch):
        try:
            return masks.from_mod(relative_to_first_key, batch=batch)
        except MaskError:
            continue  # it depends on the batch index, on the head, or returns anything but one bool
    from transformers.masking_utils import sdpa_mask

    pairs = sdpa_mask(
        batch_size=extent.batch,
        q_length=extent.queries,
        kv_length=extent.keys,
        q_offset=extent.query_offset,
        kv_offset=extent.key_offset,
        mask_function=function,
        allow_is_causal_skip=False,
        use_vmap=True,
        device=extent.device,
    )
    return masks.where(keep=pairs)


def padding_mask(tokens: Tensor, extent: MaskExtent) -> Mask:
    """The mask of non-padding keys, from bool (batch, length) over all positions, where True = token."""
    if extent.key_offset or tokens.shape[-1] > extent.keys:
        tokens = tokens[:, extent.key_offset : extent.key_offset + extent.keys]
    if (missing := extent.keys - tokens.shape[-1]) > 0:
        tokens = torch.nn.functional.pad(tokens, (0, missing))  # keys not yet written
    return EVERYTHING if bool(tokens.all()) else masks.from_huggingface(tokens)


def is_causal_mask(mask: Mask) -> bool:
    """Whether no query attends to a later key, as far as it can be decided; False where it cannot."""
    match mask:
        case Causal():
            return True
        case Window(after=after):
            return after == 0
        case And(left=left, right=right):
            return is_causal_mask(left) or is_causal_mask(right)
        case Or(left=left, right=right):
            return is_causal_mask(left) and is_causal_mask(right)
    return False


def intersection(parts: Sequence[Mask]) -> Mask:
    """The intersection of masks, without those that allow everything."""
    parts = [part for part in parts if part != EVERYTHING]
    return reduce(and_, parts) if parts else EVERYTHING


def union(parts: Sequence[Mask]) -> Mask:
    """The union of masks."""
    return EVERYTHING if EVERYTHING in parts else reduce(or_, parts)


def _qualified_name(function: MaskFunction) -> str:
    """Qualified name of a function of transformers.masking_utils; '' for any other."""
    is_theirs = getattr(function, "__module__", None) == "transformers.masking_utils"
    return getattr(function, "__qualname__", "").replace(".<locals>", "") if is_theirs else ""


def _closure(function: MaskFunction) -> dict[str, Any]:
    """Closure variables of a function by name."""
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _causal(_: dict[str, Any], extent: MaskExtent) -> Mask:
    return EVERYTHING if extent.first_query >= extent.keys - 1 else masks.causal()


def _sliding(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    # key > query - W: W keys including the query's own, so W - 1 before it.
    return _window(closure["sliding_window"] - 1, None, extent)


def _sliding_both_ways(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    # |query - key| <= W: W on each side of the query's own.
    return _window(closure["sliding_window"], closure["sliding_window"], extent)


def _window(before: int, after: int | None, extent: MaskExtent) -> Mask:
    if before < 0:
        return ~EVERYTHING  # a window of no keys, in configurations without sliding layers
    return masks.window(
        None if before >= extent.last_query else before,
        None if after is None or after >= extent.keys - 1 - extent.first_query else after,
    )


def _chunked(closure: dict[str, Any], extent: MaskExtent) -> Mask | None:
    end = extent.key_offset + max(extent.keys, extent.last_query + 1)
    left = closure["left_padding"].unsqueeze(-1)
    chunks = (torch.arange(end, device=extent.device) - left) // closure["chunk_size"]
    return _documents(chunks, extent)


def _blockwise(closure: dict[str, Any], extent: MaskExtent) -> Mask | None:
    ids = closure["block_sequence_ids"]
    blocks = _documents(ids, extent)
    if blocks is None:
        return None
    return intersection([blocks, padding_mask(ids >= 0, extent)])  # -1 is no block


def _packed(closure: dict[str, Any], extent: MaskExtent) -> Mask | None:
    return _documents(closure["packed_sequence_mask"], extent)


def _padding(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    return padding_mask(closure["padding_mask"], extent)


def _documents(ids: Tensor, extent: MaskExtent) -> Mask | None:
    """Pairs of equal ids, (batch, length) over all positions; None where the ids do not cover all positions."""
    ids = ids[:, extent.key_offset :]
    if extent.first_query < 0 or ids.shape[-1] < max(extent.keys, extent.last_query + 1):
        return None
    return EVERYTHING if bool((ids == ids[:, :1]).all()) else masks.documents(ids)


def _all_of(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    functions = closure["mask_functions"]
    packed = next((_closure(function) for function in functions if _qualified_name(function) == _PACKED), None)
    parts = []
    for function in functions:
        mask = _remapped(function, packed, extent) if packed and _qualified_name(function) == _REMAPPED else None
        parts.append(convert(function, extent) if mask is None else mask)
    return intersection(parts)


def _any_of(closure: dict[str, Any], extent: MaskExtent) -> Mask:
    return union([convert(function, extent) for function in closure["mask_functions"]])


def _remapped(function: MaskFunction, packed: dict[str, Any], extent: MaskExtent) -> Mask | None:
    """The mask of a function of positions within packed documents, which is intersected with the documents themselves.

    Where positions increase by 1 within every document, distances within one are the same in both numberings, so a mask
    of distances alone may use the positions from the first key. None in other cases.
    """
    closure, documents = _closure(function), packed["packed_sequence_mask"]
    within, positions = documents.diff(dim=-1) == 0, closure["position_ids"].diff(dim=-1) == 1
    consecutive = bool((documents.diff(dim=-1) >= 0).all()) and bool((positions | ~within).all())
    inner = convert(closure["mask_function"], extent)
    return inner if consecutive and inner.by_distance else None


_PACKED = "packed_sequence_mask_function.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.inner_mask"

_CONVERTERS: dict[str, Callable[[dict[str, Any], MaskExtent], Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda closure, extent: EVERYTHING,
    "sliding_window_overlay.inner_mask": _sliding,
    "sliding_window_bidirectional_overlay.inner_mask": _sliding_both_ways,
    "chunked_overlay.inner_mask": _chunked,
    "blockwise_overlay.inner_mask": _blockwise,
    "padding_mask_function.inner_mask": _padding,
    _PACKED: _packed,
    "and_masks.and_mask": _all_of,
    "or_masks.or_mask": _any_of,
}
