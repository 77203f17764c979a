"""How much weight each segment of the queries gives each segment of the keys."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from .base import Frame, check_memory
from .weight_sums import GroupSums

MOST_SEGMENTS = 2**13
"""The answer has as many rows, and as many columns."""


@dataclass(frozen=True)
class Mass:
    """Σ w_ij over the queries i of segment a and the keys j of segment b: (..., heads, segments, segments).

    A row of the answer sums to the number of queries of its segment that attend to something, less what a sink takes
    and what goes to keys of no segment; divided by how many there are, it is what a query of the segment gives on
    average.

    Args:
        segments: the segment of each query, from 0; below 0 it is in none. Of shape (M,) or (*batch, M).
        key_segments: the same of each key, (N,) or (*batch, N). Without it `segments` has those of the N keys, and the
            queries are the last M of them, as their positions are.

    A query that attends to NaN makes the row of its segment NaN. With dropout: of the weights before it. Computed
    without autograd. Lenses of equal segments are equal: the segments are copied.

    Raises:
        ConfigurationError: segments that are not whole numbers, or more than 8,192 of them; when used, more than the
            device has memory for.
        ShapeError: when used, not one segment for each query or key, or another batch.

    >>> import torch, regard
    >>> mass = regard.lenses.Mass([0, 0, 1, 1])
    >>> q = torch.zeros(4, 8)
    >>> regard.observe(q, q, q, mass, mask=regard.masks.causal())[mass]
    tensor([[2.0000, 0.0000],
            [1.1667, 0.8333]])
    """

    segments: Tensor | Sequence[int] = field(compare=False)
    key_segments: Tensor | Sequence[int] | None = field(default=None, compare=False)
    # Tensors have no equality of their own; bytes do, and keep their hash.
    _compared: tuple[tuple[tuple[int, ...], bytes] | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        compared = []
        for name in ("segments", "key_segments"):
            given = getattr(self, name)
            ids = None if given is None and name == "key_segments" else _whole_numbers(name, given)
            object.__setattr__(self, name, ids)
            compared.append(None if ids is None else (tuple(ids.shape), ids.cpu().numpy().tobytes()))
        object.__setattr__(self, "_compared", tuple(compared))

    def start(self, problem: Problem) -> _Sums:
        """Begin to look."""
        frame, of_queries, of_keys = Frame.of(problem), torch.as_tensor(self.segments), self.key_segments
        if of_keys is None:
            of_keys, late = of_queries, frame.keys - frame.queries
            if late < 0 or of_keys.shape[-1] != frame.keys:
                raise ShapeError(
                    f"Mass has {of_keys.shape[-1]:,} segments for {frame.queries:,} queries and {frame.keys:,} keys: "
                    "it needs one for each key, the last ones for the queries; or give one for each query as "
                    "segments, and one for each key as key_segments"
                )
            sizes = _count(of_keys), _count(of_keys)
            of_queries = of_queries[..., late:]
        else:
            of_keys = torch.as_tensor(of_keys)
            sizes = _count(of_queries), _count(of_keys)
        check_memory(
            "Mass of {} segments",
            problem,
            sizes,
            each=frame.itemsize_of_sums,
            instead="make the segments larger, or look at Pooled((256, 256))",
        )
        rows = _fitted("segments", "queries", of_queries, frame.queries, problem)
        return _Sums(GroupSums(frame, rows, _fitted("key_segments", "keys", of_keys, frame.keys, problem), sizes))


class _Sums:
    """Sums over segments."""

    def __init__(self, groups: GroupSums) -> None:
        self.groups, self.reductions = groups, (groups,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return self.groups.frame.shown(self.groups.sums.masked_fill_(self.groups.broken(lse), math.nan))


def _whole_numbers(name: str, given: object) -> Tensor:
    """The segments as a tensor of int64 with at least one axis."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            f"Mass needs {name} as whole numbers, one for each position, such as [0, 0, 1]; they are "
            f"{reprlib.repr(given)}, which is no such list"
        ) from None
    if ids.numel() == 0 and not isinstance(given, Tensor):
        ids = ids.long()
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool or ids.ndim == 0:
        raise ConfigurationError(
            f"Mass needs {name} as whole numbers, one for each position, such as [0, 0, 1]; they are of "
            f"{ids.dtype} and the shape {tuple(ids.shape)}"
        )
    if _count(ids) > MOST_SEGMENTS:
        raise ConfigurationError(
            f"Mass shows at most {MOST_SEGMENTS:,} segments, and the largest of {name} is {int(ids.max()):,}: number "
            "them from 0, or make them larger"
        )
    return ids.to(torch.int64, copy=True)


def _count(ids: Tensor) -> int:
    """How many segments there are: they are numbered from 0."""
    return max(int(ids.max()) + 1, 0) if ids.numel() else 0


def _fitted(name: str, of: str, ids: Tensor, length: int, problem: Problem) -> Tensor:
    """Segments as (B or 1, length), where the problem is."""
    if ids.shape[-1] != length:
        raise ShapeError(f"Mass has {ids.shape[-1]:,} {name} for {length:,} {of}: it needs one for each")
    ids = ids.to(problem.value.device)
    if ids.ndim == 1:
        return ids[None]
    try:
        return ids.expand(*problem.batch, length).reshape(-1, length)
    except RuntimeError:
        raise ShapeError(
            f"Mass has {name} of the shape {tuple(ids.shape)} for the batch {tuple(problem.batch)}: they need the "
            f"shape {(*problem.batch, length)} or {(length,)}"
        ) from None
