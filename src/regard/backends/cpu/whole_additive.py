"""Attention by additive scores in C over all of few pairs, in one thread: what calls share is laid out once."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.score_forms import AdditivePairs
from . import library
from .additive_tiles import (
    BAND,
    BANDS_PER_THREAD,
    DIRECT,
    FEATURES_AT_ONCE,
    FEW_QUERIES,
    LEAST_WORK,
    SMALL_BAND,
    STRIP,
    VALUES_AT_ONCE,
    AdditiveBackwardStruct,
    AdditiveForwardStruct,
    AdditiveStruct,
    AdditiveSumsStruct,
    AdditiveTileStruct,
    pairs_struct,
)
from .library import DTYPES
from .threads import no_memory, thread_count


@dataclass(frozen=True, eq=False, slots=True)
class WholeAdditiveInC:
    """Calls with the same shapes, dtype, mask and softcap.

    scores, forward, backward: the structures of additive.h, without addresses of a call. absent: what a mask adds to
    scores, (B, H, M, N), or None. nothing_yet: the numbers of the rows before any tile, (3, B, H, M).
    """

    scores: AdditiveStruct
    forward_work: AdditiveForwardStruct
    backward_work: AdditiveBackwardStruct
    absent: Tensor | None
    nothing_yet: Tensor

    @classmethod
    def prepare(
        cls, pairs: AdditivePairs, value: Tensor, softcap: float | None, absent: Tensor | None
    ) -> WholeAdditiveInC | None:
        """What computes calls like this one; None where several threads would share the work."""
        (batch, heads, rows, features), (_, key_heads, columns, dim) = pairs.query.shape, value.shape
        heads, key_heads = batch * heads, batch * key_heads
        if thread_count(heads * rows * columns * (features + dim), LEAST_WORK) > 1:
            return None
        padded = -(-features // FEATURES_AT_ONCE) * FEATURES_AT_ONCE
        scores = AdditiveStruct(dtype=DTYPES.index(value.dtype), form=DIRECT, features=features, padded=padded)
        scores.heads, scores.key_heads, scores.rows, scores.columns = heads, key_heads, rows, columns
        scores.query_head, scores.query_row = rows * features, features
        scores.key_head, scores.key_row = columns * features, features
        scores.unit_count = heads * -(-rows // STRIP) + key_heads * -(-columns // STRIP)
        band = BAND if heads * rows >= BANDS_PER_THREAD * BAND else SMALL_BAND
        forward, backward = AdditiveForwardStruct(band=band), AdditiveBackwardStruct()
        forward.unit_count = heads * -(-rows // band)
        forward.row_end, forward.column_end = rows, columns
        for work in (forward, backward):
            work.bias, work.softcap, work.keep_probability = pairs_struct(absent), softcap or 0.0, 1.0
            work.value_head, work.value_row, work.value_dim = columns * dim, dim, dim
        for name in ("upstream", "output"):
            setattr(backward, f"{name}_head", rows * dim)
            setattr(backward, f"{name}_row", dim)
        backward.value_padded = -(-dim // VALUES_AT_ONCE) * VALUES_AT_ONCE
        nothing_yet = torch.full((3, *pairs.query.shape[:3]), -math.inf, device="cpu")
        nothing_yet[2] = 0.0
        return cls(scores, forward, backward, absent, nothing_yet)

    def forward(self, pairs: AdditivePairs, value: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        prepared, value = _Prepared(self.scores, pairs), value.contiguous()
        output = value.new_empty(*pairs.query.shape[:3], value.shape[3])
        lse, maximum, total = self.nothing_yet.clone().unbind()
        work = AdditiveForwardStruct.from_buffer_copy(self.forward_work)
        work.scores, work.value, work.output = ctypes.addressof(prepared.work), value.data_ptr(), output.data_ptr()
        work.lse, work.maximum, work.total = lse.data_ptr(), maximum.data_ptr(), total.data_ptr()
        library.current().additive_forward(ctypes.byref(work))
        if work.failed:
            raise no_memory()
        return output, lse

    def backward(
        self, pairs: AdditivePairs, value: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of query, key, weight and value, in their dtypes, as `AdditiveBackward` has them."""
        prepared, value, grad_output = _Prepared(self.scores, pairs), value.contiguous(), grad_output.contiguous()
        if self.absent is not None:
            lse = lse.masked_fill(lse == -math.inf, math.inf)  # rows without keys take no part
        sums = _Sums(self.scores, self.backward_work.value_padded)
        rows, columns, units = self.scores.rows, self.scores.columns, self.scores.heads * self.scores.rows
        upstream = torch.empty(units * columns, device="cpu")
        tile = AdditiveTileStruct(0, rows, 0, columns, 0, units, upstream.data_ptr(), rows * columns, columns)
        work = AdditiveBackwardStruct.from_buffer_copy(self.backward_work)
        work.scores, work.tile = ctypes.addressof(prepared.work), ctypes.addressof(tile)
        work.value, work.upstream, work.output = value.data_ptr(), grad_output.data_ptr(), output.data_ptr()
        work.lse, work.lse_gradient = lse.data_ptr(), sums.nothing.data_ptr()
        work.value_gradient = sums.value.data_ptr()
        native = library.current()
        native.additive_tile_gradients(ctypes.byref(work))
        if work.failed:
            raise no_memory()
        if self.scores.features:
            native.additive_backward(ctypes.byref(prepared.work), ctypes.byref(tile), ctypes.byref(sums.work))
        return sums.gradients(pairs, value)


class _Prepared:
    """Queries, keys and weight of a call as `AdditiveScores` prepares them; it owns the memory that C reads."""

    __slots__ = ("tensors", "work")

    def __init__(self, template: AdditiveStruct, pairs: AdditivePairs) -> None:
        work = AdditiveStruct.from_buffer_copy(template)
        query, key, weight = pairs.query.contiguous(), pairs.key.contiguous(), pairs.weight.float().contiguous()
        queries, strips = work.heads * work.rows, work.key_heads * -(-work.columns // STRIP)
        of_queries, of_keys = queries * work.padded, strips * work.padded * STRIP
        room = torch.empty(of_queries + of_keys + work.padded + FEATURES_AT_ONCE + queries + strips, device="cpu")
        self.tensors, self.work = (query, key, weight, room), work
        at = room.data_ptr()
        work.query, work.key, work.prepared_query = query.data_ptr(), key.data_ptr(), at
        work.prepared_key = at = at + 4 * of_queries
        padded_weight = at = at + 4 * of_keys
        work.query_bound = at = at + 4 * (work.padded + FEATURES_AT_ONCE)
        work.key_bound = at + 4 * queries
        native, of_work = library.current(), ctypes.byref(work)
        native.additive_weight(of_work, weight.data_ptr(), padded_weight)
        if work.features and work.rows * (work.heads // work.key_heads) > FEW_QUERIES:
            native.additive_bounds(of_work)
            native.additive_form(of_work)
            work.next_unit = 0
            native.additive_prepare(of_work)


class _Sums:
    """What the gradients are added to, and how they follow from it.

    nothing: as many zeros as there are rows.
    """

    __slots__ = ("key", "nothing", "query", "scratch", "value", "weight", "work")

    def __init__(self, scores: AdditiveStruct, value_padded: int) -> None:
        strips = -(-scores.columns // STRIP)
        shapes = (
            (2 * scores.padded,),  # float64
            (scores.key_heads, strips, scores.padded, STRIP),
            (scores.key_heads, strips * STRIP, value_padded),
            (scores.heads, scores.rows, scores.features),
            (scores.heads * scores.rows,),
        )
        zeros = torch.zeros(sum(map(math.prod, shapes)), device="cpu")
        parts = zeros.split([math.prod(shape) for shape in shapes])
        self.weight, self.key, self.value, self.query, self.nothing = (
            part.view(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        self.scratch = torch.empty(library.current().additive_scratch(scores.padded), device="cpu")
        tensors = self.query, self.key, self.weight, self.scratch
        self.work = AdditiveSumsStruct(*(tensor.data_ptr() for tensor in tensors))

    def gradients(self, pairs: AdditivePairs, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of query, key, weight and value."""
        features, columns, dtype = pairs.query.shape[3], value.shape[2], value.dtype
        weight, by_feature = pairs.weight.detach(), self.key.mT.flatten(1, 2)[:, :columns, :features]
        return (
            (self.query * weight).view_as(pairs.query).to(dtype),
            (by_feature * weight).view_as(pairs.key).to(dtype),
            self.weight.view(torch.float64)[:features].to(weight.dtype),
            self.value[:, :columns, : value.shape[3]].reshape(value.shape).to(dtype),
        )
