"""The mask of all pairs as one tensor, and the two masks that need none: causal over a square, and one last query."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from ..core.problem import Problem
from ..masks.causal import Causal
from .memo import memoize

MAX_MEMO_PAIRS = 2**14
"""Up to so many pairs a mask is memoized as a tensor, 16 KiB for each batch and head that it distinguishes."""


def is_square_causal(problem: Problem) -> bool:
    """Whether the mask equals torch's is_causal=True: causal, M = N and default positions."""
    return (
        isinstance(problem.mask, Causal)
        and problem.bias is None
        and problem.queries == problem.keys
        and problem.shift == 0
    )


def is_one_causal_query(problem: Problem) -> bool:
    """Whether the mask is causal and masks nothing: one query, at the position of the last key, as in decoding."""
    return problem.queries == 1 and isinstance(problem.mask, Causal) and problem.shift == 0


def dense_mask(problem: Problem) -> Tensor | None:
    """Which pairs of the whole grid exist (True = attend); None: all do. Small ones are memoized: do not write."""
    return _memoized_matrix(problem, "dense", problem.keep)


def dense_mask_added(problem: Problem) -> Tensor | None:
    """The mask of the whole grid as what is added to scores, 0 or -inf, in float32 at least, as `dense_mask`."""
    dtype = torch.promote_types(problem.value.dtype, torch.float32)

    def compute() -> Tensor | None:
        keep = problem.keep()
        if keep is None:
            return None
        return torch.where(keep, torch.zeros((), dtype=dtype, device=keep.device), float("-inf"))

    return _memoized_matrix(problem, dtype, compute)


def _memoized_matrix(problem: Problem, what: Hashable, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """A tensor over all pairs that follows from the mask, memoized where they are few."""
    if problem.mask is None or problem.queries * problem.keys > MAX_MEMO_PAIRS:
        return compute()

    def anew() -> Tensor | None:
        with torch.inference_mode(False):  # an inference tensor would be of no use to a call with gradients
            return compute()

    return memoize(problem, (what, problem.value.device), anew)
