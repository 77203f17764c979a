"""Attention over torch's nested tensors of the layout torch.jagged: sequences of their own lengths, packed into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from .biases import Bias, RelativeBias
from .errors import ConfigurationError, MaskError, ShapeError
from .masks import Mask, documents

PADDED = (
    "pass torch.nested.to_padded_tensor(query, 0.0) and likewise keys and values, with masks.padding(lengths=...) of "
    "the keys joined to the mask"
)
"""What is left for what is no function of a pair's distance."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedSequences:
    """The rows of all sequences one after another, (1, heads, total, dim) or (1, total, dim), and where each begins."""

    rows: Tensor
    offsets: Tensor

    @classmethod
    def from_jagged(cls, name: str, tensor: Tensor) -> PackedSequences:
        """Those of a jagged tensor (batch, heads, length, dim) or (batch, length, dim).

        Raises:
            ShapeError: another layout or order of axes; a tensor with gaps between its sequences.
        """
        if not tensor.is_nested or tensor.layout is not torch.jagged:
            raise ShapeError(
                f"{name} is no nested tensor of layout=torch.jagged, but the query is, or key or value: they need to "
                "be all, or none"
            )
        jagged: Any = tensor
        if tensor.ndim not in (3, 4) or jagged._ragged_idx != tensor.ndim - 2:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)}, whose ragged axis is {jagged._ragged_idx}; it needs "
                "(batch, heads, length, dim) or (batch, length, dim) with a ragged length: call .transpose(1, 2)"
            )
        if jagged.lengths() is not None:
            raise ShapeError(f"{name} has gaps between its sequences: call {name}.contiguous()")
        return cls(jagged.values().unsqueeze(0), jagged.offsets())

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence."""
        return self.offsets.diff()

    def as_jagged(self, rows: Tensor) -> Tensor:
        """A jagged tensor of other rows of these sequences."""
        rows = rows.squeeze(0)
        if rows.ndim == 2:
            return torch.nested.nested_tensor_from_jagged(rows, self.offsets)
        return torch.nested.nested_tensor_from_jagged(rows.transpose(0, 1), self.offsets).transpose(1, 2)


def attend_jagged(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    query_positions: object = None,
    key_positions: object = None,
    from_start: bool = False,
    **options: Any,
) -> Tensor:
    """`attend` of each sequence by itself: all are packed into one, in which pairs of two sequences are masked.

    from_start: whether the queries of a sequence sit at its first keys; else at its last ones.

    Raises:
        ShapeError: tensors that do not fit.
        MaskError: a mask or a bias that is not by distance alone.
        ConfigurationError: positions.
    """
    if mask is not None and not (isinstance(mask, Mask) and mask.by_distance):
        raise MaskError(
            "over jagged tensors a mask is by distance, such as masks.causal() or masks.window(...); this is "
            f"{mask!r}: {PADDED}"
        )
    if bias is not None and not isinstance(bias, RelativeBias):
        raise MaskError(f"over jagged tensors a bias is by distance, such as biases.alibi(heads); {PADDED}")
    if query_positions is not None or key_positions is not None:
        raise ConfigurationError(f"sequences of a jagged tensor have the positions from 0 on: for others {PADDED}")
    normalizer = options.get("normalizer")
    if normalizer is not None and normalizer.rows_before != 0:
        raise ConfigurationError(
            f"weights of {normalizer.name} follow from neighbouring queries, which in packed sequences are those of "
            f"another one: {PADDED}"
        )
    queries, keys, values = (
        PackedSequences.from_jagged(name, tensor) for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    if not torch.equal(keys.lengths, values.lengths) or len(queries.lengths) != len(keys.lengths):
        raise ShapeError(
            f"query has {len(queries.lengths)} sequences, key those of the lengths {keys.lengths.tolist()}, value "
            f"{values.lengths.tolist()}: keys and values need the same, as many as the queries"
        )
    placed, apart = _placed(queries.lengths, keys.lengths, from_start=from_start)
    parts = [apart] if mask is None else [mask, apart]
    rows = attend(queries.rows, keys.rows, values.rows, mask=reduce(and_, parts), bias=bias, **placed, **options)
    return queries.as_jagged(rows)


def _placed(queries: Tensor, keys: Tensor, *, from_start: bool) -> tuple[dict[str, Tensor], Mask]:
    """Positions of packed queries and keys, none where they are the default ones, and the mask of their sequences."""
    room = torch.maximum(queries, keys)
    ids = documents(torch.arange(len(room), device=room.device).repeat_interleave(room))
    if torch.equal(queries, keys):
        return {}, ids
    first, free = room.cumsum(0) - room, 0 if from_start else room
    own = {"query_positions": (queries, first + free - (0 if from_start else queries))}
    own["key_positions"] = (keys, first + free - (0 if from_start else keys))
    return {name: _positions(lengths, start) for name, (lengths, start) in own.items()}, ids


def _positions(lengths: Tensor, first: Tensor) -> Tensor:
    """The positions of sequences of some lengths, each from its first one on."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) + (first - before).repeat_interleave(lengths)
