"""Conversion between masks and flash-attn's arguments cu_seqlens and window_size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import MaskError
from ..base import Mask, as_mask
from ..causal import Causal
from ..documents import CrossDocuments, Documents, documents
from ..index_checks import whole_numbers
from ..window import Window, window
from .torch_tensors import conjuncts


def from_cu_seqlens(cu_seqlens: Tensor | Sequence[int], key_cu_seqlens: Tensor | Sequence[int] | None = None) -> Mask:
    """`documents` from flash-attn's cumulative lengths: packed sequence i has the positions cu[i]..cu[i+1]-1.

    With `key_cu_seqlens`, flash-attn's cu_seqlens_k, queries and keys are packed each by their own lengths, as in
    cross-attention: queries of sequence i attend to keys of sequence i, and sit at 0..M-1 (`query_positions=range(M)`
    of `attention`).

    Shapes: cu_seqlens is (sequences + 1,), whole numbers: 0, then the end of each sequence; key_cu_seqlens likewise, of
    as many sequences. Sequences may be empty: queries whose sequence has no keys attend to nothing.

    Raises:
        MaskError: not one axis of whole numbers; one that does not start at 0, or decreases; two numbers of sequences.

    >>> from regard import masks
    >>> masks.from_cu_seqlens([0, 2, 3]).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    >>> masks.from_cu_seqlens([0, 2, 3], [0, 1, 4]).dense(3, 4, query_positions=range(3)).int()
    tensor([[1, 0, 0, 0],
            [1, 0, 0, 0],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    ids = _ids_by_ends("cu_seqlens", cu_seqlens)
    if key_cu_seqlens is None:
        return documents(ids)
    key_ids, counts = _ids_by_ends("key_cu_seqlens", key_cu_seqlens), (len(cu_seqlens) - 1, len(key_cu_seqlens) - 1)
    if counts[0] != counts[1]:
        raise MaskError(
            f"cu_seqlens has {counts[0]} sequences and key_cu_seqlens {counts[1]}; both need the same number: one "
            "without queries, or without keys, has the end of the sequence before it"
        )
    return documents(ids, key_ids)


def _ids_by_ends(name: str, cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    """The number of each position's sequence, (L,), from the checked ends."""
    ends = whole_numbers("from_cu_seqlens", name, cu_seqlens)
    if ends.ndim != 1 or not len(ends):
        raise MaskError(
            f"from_cu_seqlens needs {name} of shape (sequences + 1,), 0 and then the end of each sequence; it has "
            f"the shape {tuple(ends.shape)}"
        )
    if int(ends[0]):
        raise MaskError(f"{name} starts at {int(ends[0])}; it needs to start at 0, where the first sequence does")
    lengths = ends.diff()
    if (lengths < 0).any():
        at = int((lengths < 0).nonzero()[0])
        raise MaskError(
            f"{name} decreases from {int(ends[at])} to {int(ends[at + 1])}; it needs the ends of the sequences one "
            "after the other. Lengths become ends by [0] and their cumsum"
        )
    return torch.arange(len(lengths), device=ends.device).repeat_interleave(lengths)


def to_cu_seqlens(mask: Mask) -> Tensor:
    """The cumulative lengths of the documents of one packed sequence: int32 (documents + 1,).

    The mask is `documents(ids)` alone: flash-attn has other arguments for `causal()` and `window(...)`.

    Raises:
        MaskError: another mask; ids with a batch; a document that continues after another began.

    >>> from regard import masks
    >>> masks.to_cu_seqlens(masks.documents([7, 7, 9]))
    tensor([0, 2, 3], dtype=torch.int32)
    """
    if isinstance(as_mask(mask), CrossDocuments):
        raise MaskError(
            f"{mask!r} has ids of queries and ids of keys, and to_cu_seqlens returns the ends of one sequence: give it "
            "documents(query_ids) for flash-attn's cu_seqlens_q and documents(key_ids) for cu_seqlens_k, both with the "
            "same documents"
        )
    if not isinstance(mask, Documents):
        raise MaskError(
            f"to_cu_seqlens needs documents(ids); this is {mask!r}. Of masks joined by &, hand over the documents alone"
        )
    ids = mask.ids
    if ids.ndim != 1:
        raise MaskError(
            f"to_cu_seqlens needs the ids of one packed sequence, (L,); these have the shape {tuple(ids.shape)}: give "
            "documents(ids[i]) for each of the batch"
        )
    begins = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    begins[1:] = ids[1:] != ids[:-1]
    firsts = begins.nonzero().squeeze(-1)
    names, runs = ids[firsts].unique(return_counts=True)
    if (runs > 1).any():
        raise MaskError(
            f"to_cu_seqlens: document {int(names[runs > 1][0])} goes on after another began; each has to be one run "
            "of positions"
        )
    return torch.cat([firsts, firsts.new_tensor([len(ids)])]).int()


def from_window_size(window_size: tuple[int, int]) -> Mask:
    """`window` from flash-attn's window_size, (left, right), both without the position itself, -1 = unlimited.

    Raises:
        MaskError: not two whole numbers of at least -1.

    >>> from regard import masks
    >>> masks.from_window_size((511, 0)), masks.from_window_size((-1, -1))
    (window(before=511, after=0), window())
    """
    sides = whole_numbers("from_window_size", "window_size", window_size)
    if sides.shape != (2,) or int(sides.min()) < -1:
        raise MaskError(
            f"window_size is {window_size!r}; it needs (left, right), whole numbers of at least -1, where -1 = "
            "unlimited"
        )
    before, after = (None if side == -1 else side for side in sides.tolist())
    return window(before, after)


def to_window_size(mask: Mask) -> tuple[int, int]:
    """flash-attn's window_size, (left, right), for `window(...)`, `causal()` and these joined by `&`; -1 = unlimited.

    Raises:
        MaskError: any other mask.

    >>> from regard import masks
    >>> masks.to_window_size(masks.causal() & masks.window(before=511))
    (511, 0)
    """
    befores, afters = [], []
    for part in conjuncts(as_mask(mask)):
        if not isinstance(part, Causal | Window):
            raise MaskError(
                f"to_window_size: {part!r} is no window; it needs window(...), causal() or both joined by &"
            )
        before, after = (None, 0) if isinstance(part, Causal) else (part.before, part.after)
        befores += [] if before is None else [before]
        afters += [] if after is None else [after]
    return min(befores, default=-1), min(afters, default=-1)
