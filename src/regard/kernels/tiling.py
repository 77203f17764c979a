"""The layout of a problem: which tiles its mask leaves, worked out once for each mask and size."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch

from ..blocks import Blocks
from ..masks import Mask
from ..problem import Problem
from ..structure import take_apart
from ..tiles import EMPTY, FULL, PARTIAL
from .layout import Layout

REMEMBERED = 128
"""How many masks without tensors are remembered; one with tensors is remembered as long as it is alive."""

_layouts: weakref.WeakKeyDictionary[Mask, dict[tuple, Layout]] = weakref.WeakKeyDictionary()
_recent: deque[Mask] = deque(maxlen=REMEMBERED)


def layout(problem: Problem, size: tuple[int, int], apart: int) -> Layout:
    """The tiles of `size` that the problem's mask leaves, for all its batches and heads together."""
    shape = problem.queries, problem.keys
    mask = problem.mask
    if mask is None or problem.query_positions is not None or problem.key_positions is not None:
        return Layout.of(_verdicts(problem, size), size, shape, apart=apart)
    tensors = take_apart(mask)[0]
    if any(tensor.is_inference() for tensor in tensors):  # which do not tell when they are written to
        return Layout.of(_verdicts(problem, size), size, shape, apart=apart)
    known = _layouts.get(mask)
    if known is None:
        known = _layouts[mask] = {}
        if not tensors:
            _recent.append(mask)
    key = (shape, size, apart, tuple(tensor._version for tensor in tensors))
    found = known.get(key)
    if found is None:
        found = known[key] = Layout.of(_verdicts(problem, size), size, shape, apart=apart)
    return found


def visited(problem: Problem) -> int:
    """The pairs in the tiles that the problem's mask leaves, of those of one batch and head."""
    return layout(problem, (128, 64), 1).visited


def _verdicts(problem: Problem, size: tuple[int, int]) -> np.ndarray:
    """(R, C) verdicts; where batches or heads differ, a tile is EMPTY or FULL if it is so for each of them."""
    blocks = Blocks.of(problem.grid(), size)
    if problem.mask is None:
        return np.full(blocks.shape, FULL, dtype=np.int8)
    problem.keep(problem.grid().tile(slice(0, 1), slice(0, 1)))  # says so if the mask does not fit
    verdicts = problem.mask.verdicts(blocks)
    if verdicts.ndim > 2:
        each = verdicts.flatten(0, -3)
        if not len(each):
            return np.full(blocks.shape, EMPTY, dtype=np.int8)
        verdicts = torch.where(each.amin(0) == each.amax(0), each[0], PARTIAL)
    return verdicts.cpu().numpy().astype(np.int8)
