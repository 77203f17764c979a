"""Attention over torch's nested tensors, jagged or strided: sequences of their own lengths, packed into one."""

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
from .utils.other_types import name_type

PADDED = (
    "pass torch.nested.to_padded_tensor(query, 0.0) and likewise keys and values, with masks.padding(lengths=...) of "
    "the keys joined to the mask"
)
"""What is left for what is no function of a pair's distance."""
AXES = "it needs (batch, heads, length, dim) or (batch, length, dim) with a ragged length: call .transpose(1, 2)"
"""What axes a nested tensor needs."""


@dataclass(frozen=True, eq=False, slots=True)
class PackedSequences:
    """The rows of all sequences one after another, (1, heads, total, dim) or (1, total, dim), and where each begins."""

    rows: Tensor
    offsets: Tensor
    layout: torch.layout

    @classmethod
    def from_nested(cls, name: str, tensor: Tensor, layout: torch.layout) -> PackedSequences:
        """Those of a nested tensor (batch, heads, length, dim) or (batch, length, dim) of this layout.

        Raises:
            ShapeError: another layout or order of axes; a jagged tensor with gaps between its sequences.
        """
        if not tensor.is_nested or tensor.layout is not layout:
            raise ShapeError(
                f"{name} is no nested tensor of layout={layout}, but the query is, or key or value: they need to be "
                "all, or none"
            )
        return cls._from_jagged(name, tensor) if layout is torch.jagged else cls._from_strided(name, tensor)

    @classmethod
    def _from_jagged(cls, name: str, tensor: Tensor) -> PackedSequences:
        jagged: Any = tensor
        if tensor.ndim not in (3, 4) or jagged._ragged_idx != tensor.ndim - 2:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)}, whose ragged axis is {jagged._ragged_idx}; {AXES}"
            )
        if jagged.lengths() is not None:
            raise ShapeError(f"{name} has gaps between its sequences: call {name}.contiguous()")
        return cls(jagged.values().unsqueeze(0), jagged.offsets(), torch.jagged)

    @classmethod
    def _from_strided(cls, name: str, tensor: Tensor) -> PackedSequences:
        parts = tensor.unbind()
        others = {(*part.shape[:-2], *part.shape[-1:]) for part in parts}
        if tensor.ndim not in (3, 4) or len(others) != 1:
            raise ShapeError(f"{name} has sequences of the shapes {[tuple(part.shape) for part in parts]}; {AXES}")
        lengths = torch.tensor([0, *(part.shape[-2] for part in parts)], device=tensor.device)
        return cls(torch.cat(parts, -2).unsqueeze(0), lengths.cumsum(0), torch.strided)

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence."""
        return self.offsets.diff()

    @property
    def heads(self) -> int:
        """The number of heads; 1 where there is no axis of heads."""
        return self.rows.shape[1] if self.rows.ndim == 4 else 1

    def as_nested(self, rows: Tensor) -> Tensor:
        """A nested tensor of other rows of these sequences."""
        rows = rows.squeeze(0)
        if self.layout is torch.strided:
            return torch.nested.as_nested_tensor(list(rows.split(self.lengths.tolist(), -2)))
        if rows.ndim == 2:
            return torch.nested.nested_tensor_from_jagged(rows, self.offsets)
        return torch.nested.nested_tensor_from_jagged(rows.transpose(0, 1), self.offsets).transpose(1, 2)


def attend_nested(
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
    groups: bool = True,
    **options: Any,
) -> Tensor:
    """`attend` of each sequence by itself: all are packed into one, in which pairs of two sequences are masked.

    from_start: whether the queries of a sequence sit at its first keys; else at its last ones.
    groups: whether groups of query heads may share a key head.

    Raises:
        ShapeError: tensors that do not fit.
        MaskError: a mask or a bias that is not by distance alone.
        ConfigurationError: positions.
    """
    if mask is not None and not (isinstance(mask, Mask) and mask.by_distance):
        raise MaskError(
            "over nested tensors a mask is by distance, such as masks.causal() or masks.window(...); this is "
            f"{mask if isinstance(mask, Mask) else name_type('mask', mask)}: {PADDED}"
        )
    if bias is not None and not isinstance(bias, RelativeBias):
        raise MaskError(f"over nested tensors a bias is by distance, such as biases.alibi(heads); {PADDED}")
    if query_positions is not None or key_positions is not None:
        raise ConfigurationError(f"sequences of a nested tensor have the positions from 0 on: for others {PADDED}")
    normalizer = options.get("normalizer")
    if normalizer is not None and normalizer.rows_before != 0:
        raise ConfigurationError(
            f"weights of {normalizer.name} follow from neighbouring queries, which in packed sequences are those of "
            f"another one: {PADDED}"
        )
    queries, keys, values = (
        PackedSequences.from_nested(name, tensor, query.layout)
        for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    if not torch.equal(keys.lengths, values.lengths) or len(queries.lengths) != len(keys.lengths):
        raise ShapeError(
            f"query has {len(queries.lengths)} sequences, key those of the lengths {keys.lengths.tolist()}, value "
            f"{values.lengths.tolist()}: keys and values need the same, as many as the queries"
        )
    if not groups and not queries.heads == keys.heads == values.heads:
        raise ShapeError(
            f"query has {queries.heads} heads and key {keys.heads}, value {values.heads}: pass enable_gqa=True to let "
            "groups of query heads share a key head"
        )
    placed, apart = _placed(queries.lengths, keys.lengths, from_start=from_start)
    parts = [apart] if mask is None else [mask, apart]
    rows = attend(queries.rows, keys.rows, values.rows, mask=reduce(and_, parts), bias=bias, **placed, **options)
    return queries.as_nested(rows)


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
