"""Which tiles the mask of a problem leaves, worked out once for each mask and size."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ..blocks import Blocks
from ..masks import Mask
from ..problem import Problem
from ..structure import tensors_of
from ..tiles import EMPTY, FULL, PARTIAL
from .layout import Layout

IN_VAIN = 2**16
"""Pairs, of all heads, that a part may visit in vain: they take about as long as the calls that another part takes."""
REMEMBERED = 128
"""How many masks without tensors are remembered; one with tensors is remembered as long as it is alive."""
SIZES = 64
"""For how many sizes each mask is remembered, before all of them are forgotten: a cache has another with each token."""


Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Part:
    """Some neighbouring batches, of all leading axes together, that see the same tiles."""

    batch: slice
    layout: Layout


_known: weakref.WeakKeyDictionary[Mask, dict[tuple, Any]] = weakref.WeakKeyDictionary()
_recent: deque[Mask] = deque(maxlen=REMEMBERED)
_without_mask: dict[tuple, Any] = {}


def parts(problem: Problem, size: tuple[int, int], apart: int) -> tuple[Part, ...]:
    """The tiles of `size` that the problem's mask leaves, batch by batch where these differ; all heads together."""
    return remembered(problem, (size, apart), lambda: _parts(problem, size, apart))


def remembered(
    problem: Problem, what: Hashable, compute: Callable[[], Found], when: Callable[[Found], bool] = lambda _: True
) -> Found:
    """What follows from the problem's mask and sizes alone, worked out once; `when` says whether it is to be kept."""
    mask, shape = problem.mask, (problem.batch.numel(), problem.queries, problem.keys)
    tensors = tensors_of(mask)
    placed = problem.query_positions is not None or problem.key_positions is not None
    if placed or any(tensor.is_inference() for tensor in tensors):
        # Nothing to remember it by: inference tensors do not tell when they are written to.
        return compute()
    known = _without_mask if mask is None else _known.setdefault(mask, {})
    if mask is not None and not known and not tensors:
        _recent.append(mask)
    key = (what, shape, tuple(tensor._version for tensor in tensors))
    if key in known:
        return known[key]
    found = compute()
    if when(found):
        if len(known) >= SIZES:
            known.clear()
        known[key] = found
    return found


def layout(problem: Problem, size: tuple[int, int], apart: int) -> Layout:
    """The tiles that the problem's mask leaves to any of its batches and heads."""
    found = parts(problem, size, apart)
    if len(found) == 1:
        return found[0].layout
    return _layout(_verdicts(problem, size), problem, size, apart)


def visited(problem: Problem, size: tuple[int, int] = (128, 64), apart: int = 1) -> int:
    """The pairs in the tiles that the problem's mask leaves, over all batches, for one head."""
    found = parts(problem, size, apart)
    return sum((part.batch.stop - part.batch.start) * part.layout.visited for part in found)


def distinct(problem: Problem) -> tuple[int, int]:
    """For how many batches and heads the mask is asked, and the bias; 0 where there is none."""
    tile = problem.grid().tile(slice(0, 1), slice(0, 1))
    keep, bias = problem.keep(tile), problem.bias_values(tile)
    return (0 if keep is None else keep.shape[:-2].numel()), (0 if bias is None else bias.shape[:-2].numel())


def _parts(problem: Problem, size: tuple[int, int], apart: int) -> tuple[Part, ...]:
    if problem.mask is None:
        whole = Layout.whole(size[0], (problem.queries, problem.keys))
        return (Part(slice(0, problem.batch.numel()), whole),)
    verdicts, batches = _verdicts(problem, size), problem.batch.numel()
    if len(verdicts) != batches:
        return (Part(slice(0, batches), _layout(verdicts, problem, size, apart)),)
    return tuple(
        Part(slice(start, stop), _layout(verdicts[start:stop], problem, size, apart))
        for start, stop in pairwise(_edges(verdicts, problem, size))
    )


def _edges(verdicts: np.ndarray, problem: Problem, size: tuple[int, int]) -> list[int]:
    """Where one part ends and the next begins: neighbours go together unless that visits too many pairs in vain."""
    taken = verdicts != EMPTY
    if len(verdicts) and (taken == taken[0]).all():
        return [0, len(verdicts)]  # all see the same tiles: the usual case of a padded batch
    heads = problem.weights_shape[-3] if problem.heads else 1
    areas = Blocks.of(problem.grid(), size).areas.cpu().numpy()
    seen = [int(areas[verdict != EMPTY].sum()) for verdict in verdicts]
    edges, together = [0], verdicts[:1]
    for at in range(1, len(verdicts)):
        both = np.concatenate([together, verdicts[at : at + 1]])
        visited = int(areas[_together(both) != EMPTY].sum()) * (at + 1 - edges[-1])
        if (visited - sum(seen[edges[-1] : at + 1])) * heads <= IN_VAIN:
            together = _together(both)[None]
        else:
            edges.append(at)
            together = verdicts[at : at + 1]
    return [*edges, len(verdicts)] if len(verdicts) else edges


def _layout(verdicts: np.ndarray, problem: Problem, size: tuple[int, int], apart: int) -> Layout:
    """The layout that serves all of some verdicts (·, R, C)."""
    return Layout.of(_together(verdicts), size, (problem.queries, problem.keys), apart=apart)


def _verdicts(problem: Problem, size: tuple[int, int]) -> np.ndarray:
    """(batches or 1, R, C) verdicts on tiles; a tile is EMPTY or FULL if it is so for each head."""
    blocks = Blocks.of(problem.grid(), size)
    if problem.mask is None:
        return np.full((1, *blocks.shape), FULL, dtype=np.int8)
    problem.keep(problem.grid().tile(slice(0, 1), slice(0, 1)))  # says so if the mask does not fit
    verdicts = problem.mask.verdicts(blocks).cpu()
    if verdicts.ndim == 2:
        return verdicts[None].numpy()
    heads = 1
    if problem.heads:
        heads = verdicts.shape[-3]
        verdicts = verdicts.expand(*problem.batch, *verdicts.shape[-3:]) if verdicts.ndim > 3 else verdicts[None]
    else:
        verdicts = verdicts.expand(*problem.batch, *verdicts.shape[-2:])
    each = verdicts.reshape(verdicts.shape[: -3 if problem.heads else -2].numel(), heads, *blocks.shape).numpy()
    together = [_together(batch) for batch in each]  # of no batch there is nothing to stack
    return each[:, 0] if heads == 1 else np.array(together, dtype=np.int8).reshape(len(each), *blocks.shape)


def _together(verdicts: np.ndarray) -> np.ndarray:
    """One verdict of several: EMPTY or FULL where all are, PARTIAL elsewhere; EMPTY where there are none."""
    if not len(verdicts):
        return np.full(verdicts.shape[1:], EMPTY, dtype=np.int8)
    return np.where(verdicts.min(0) == verdicts.max(0), verdicts[0], PARTIAL).astype(np.int8)
