"""The weight from each segment of the queries to each segment of the keys."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from .base import RowShard, WeightsLayout, check_memory
from .weight_sums import GroupSums

MOST_SEGMENTS = 2**13
"""The largest number of rows and columns of a result."""


@dataclass(frozen=True)
class Mass:
    """Σ w_ij over the queries i of segment a and the keys j of segment b: (..., heads, segments, segments).

    A row of the result sums to the number of queries of its segment that attend to something, less the weight of sinks
    and of keys in no segment. Divided by that number it is the mean over the queries of the segment.

    Args:
        segments: the segment of each query, from 0; negative for none. Of shape (M,) or (*batch, M).
        key_segments: the same of each key, (N,) or (*batch, N). Without it `segments` is that of the N keys, and
            the queries are the last M of them, as their positions are.

    A query that attends to NaN makes the row of its segment NaN. Dropout is not applied. No autograd. Segments are
    copied, and lenses with equal segments are equal.

    Raises:
        ConfigurationError: segments that are not whole numbers, or more than 8,192 of them; when it starts, more than
            the device has memory for.
        ShapeError: when it starts, not one segment for each query or key, or another batch.

    >>> import torch, regard
    >>> mass = regard.lenses.Mass([0, 0, 1, 1])
    >>> q = torch.zeros(4, 8)
    >>> regard.observe(q, q, q, mass, mask=regard.masks.causal())[mass]
    tensor([[2.0000, 0.0000],
            [1.1667, 0.8333]])
    """

    segments: Tensor | Sequence[int] = field(compare=False)
    key_segments: Tensor | Sequence[int] | None = field(default=None, compare=False)
    # Tensors do not compare or hash by value; their bytes do.
    _compared: tuple[tuple[tuple[int, ...], bytes] | None, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        compared = []
        for name in ("segments", "key_segments"):
            value = getattr(self, name)
            ids = None if value is None and name == "key_segments" else _whole_numbers(name, value)
            object.__setattr__(self, name, ids)
            compared.append(None if ids is None else (tuple(ids.shape), ids.clone().numpy().tobytes()))
        object.__setattr__(self, "_compared", tuple(compared))

    def start(self, problem: Problem) -> _SegmentMassState:
        """The state of one run."""
        return self._start(problem, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _SegmentMassState:
        """The state of one run over the rows of one process; segments are those of all rows and keys."""
        return self._start(problem, WeightsLayout.from_problem(problem, shard))

    def _start(self, problem: Problem, layout: WeightsLayout) -> _SegmentMassState:
        query_ids, key_ids = torch.as_tensor(self.segments), self.key_segments
        if key_ids is None:
            key_ids, first = query_ids, layout.keys - layout.all_queries
            if first < 0 or key_ids.shape[-1] != layout.keys:
                raise ShapeError(
                    f"Mass has {key_ids.shape[-1]:,} segments for {layout.all_queries:,} queries and {layout.keys:,} "
                    "keys: it needs one for each key, the last ones for the queries; or give one for each query as "
                    "segments, and one for each key as key_segments"
                )
            sizes = _count(key_ids), _count(key_ids)
            query_ids = query_ids[..., first:]
        else:
            key_ids = torch.as_tensor(key_ids)
            sizes = _count(query_ids), _count(key_ids)
        check_memory(
            "Mass of {} segments",
            problem,
            sizes,
            itemsize=layout.sum_itemsize,
            advice="make the segments larger, or look at Pooled((256, 256))",
        )
        rows = layout.own_rows(_batched("segments", "queries", query_ids, layout.all_queries, problem))
        columns = _batched("key_segments", "keys", key_ids, layout.keys, problem)
        return _SegmentMassState(GroupSums(layout, rows, columns, sizes))


class _SegmentMassState:
    """Σ w over each two segments."""

    def __init__(self, groups: GroupSums) -> None:
        self.groups, self.reductions = groups, (groups,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        layout, sums = self.groups.layout, self.groups.sums.masked_fill_(self.groups.nan_groups(lse), math.nan)
        return layout.to_result(layout.total(sums))


def _whole_numbers(name: str, values: object) -> Tensor:
    """The segments as a tensor of int64 with at least one axis, on the CPU: of a device's this is the one look."""
    try:
        ids = torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise ConfigurationError(
            f"Mass needs {name} as whole numbers, one for each position, such as [0, 0, 1]; they are "
            f"{reprlib.repr(values)}, which is no such list"
        ) from None
    if ids.numel() == 0 and not isinstance(values, Tensor):
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
    """The number of segments, which are numbered from 0."""
    return max(int(ids.max()) + 1, 0) if ids.numel() else 0


def _batched(name: str, tokens: str, ids: Tensor, length: int, problem: Problem) -> Tensor:
    """Segments as (B or 1, length)."""
    if ids.shape[-1] != length:
        raise ShapeError(f"Mass has {ids.shape[-1]:,} {name} for {length:,} {tokens}: it needs one for each")
    if ids.ndim == 1:
        return ids[None]
    try:
        return ids.expand(*problem.batch, length).reshape(-1, length)
    except RuntimeError:
        raise ShapeError(
            f"Mass has {name} of the shape {tuple(ids.shape)} for the batch {tuple(problem.batch)}: they need the "
            f"shape {(*problem.batch, length)} or {(length,)}"
        ) from None
