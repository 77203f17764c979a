"""Talking heads in C over the tiles of a mask, all heads of a tile at once."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import CheckedRows
from ...core.problem import Problem
from ...normalizers import TalkingHeads
from ...tiles.tile_bits import BLOCK
from . import library
from .flash_tiles import (
    LEAST_WORK,
    FlashInC,
    FlashProblem,
    FlashStruct,
    TileWork,
    joined_gradients,
    reasons_of_tiles,
    rows_struct,
    tile_problems,
)
from .threads import run_units, thread_count

GROUP, PAIR = 8, 32
"""Heads are whole groups in C; dims are whole pairs of vectors in each variant of it: see microkernel.h."""
LN_2 = math.log(2.0)
MOST_SUMS = 2**30
"""The most bytes of gradients of keys and values that parts of the rows sum up, each on its own."""


class MixedHeadsStruct(TileWork, ctypes.Structure):
    """The structure `mixed_heads` of mixed_heads.h."""

    _fields_ = (
        ("tiles", FlashStruct),
        *((name, c_int64) for name in ("padded_heads", "padded_dim", "padded_value_dim")),
        *((name, c_void_p) for name in ("before", "after", "query", "key_columns", "key_rows")),
        *((name, c_void_p) for name in ("value_rows", "value_columns", "grad_output")),
        ("row_parts", c_int64),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_before", "grad_after")),
    )


class MixedHeadsInC:
    """Talking heads by one call of C for each slice of batches with the same tiles."""

    def why_not(self, problem: Problem) -> list[str]:
        """Other normalizers, a softcap, sinks, and what the code over tiles has no bias or mask for."""
        reasons = []
        if not isinstance(problem.normalizer, TalkingHeads):
            reasons.append("its code computes normalizers.TalkingHeads")
        return reasons_of_tiles(problem, reasons)

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs whose scores are computed."""
        return FlashInC().visited_pairs(problem)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        matrices = _padded_matrices(batched)
        return batched.join_batches([(batch, forward(part, *matrices)) for batch, part in tile_problems(batched)])

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        matrices, results, heads = _padded_matrices(batched), [], batched.shape[1]
        totals = [torch.zeros_like(each) for each in matrices if each is not None]
        for batch, part in tile_problems(batched):
            found, of_matrices = backward(part, *matrices, saved.part(batch))
            results.append((batch, found))
            totals = [total + each for total, each in zip(totals, of_matrices, strict=True)]
        gradients = joined_gradients(batched, replace(saved, needs_normalizer_grad=False), results)
        if not saved.needs_normalizer_grad:
            return gradients
        return replace(gradients, normalizer=tuple(total[:heads, :heads] for total in totals))


def _padded_matrices(batched: BatchedProblem) -> tuple[Tensor | None, Tensor | None]:
    """The matrices before and after the softmax as C reads them: 0 up to whole groups of heads."""
    normalizer, missing = batched.problem.normalizer, -batched.shape[1] % GROUP
    if not isinstance(normalizer, TalkingHeads):
        raise AssertionError("this code computes talking heads")
    before, after = (
        None if each is None else _enlarged(each.detach().float(), missing, missing).contiguous()
        for each in (normalizer.before, normalizer.after)
    )
    return before, after


def forward(part: FlashProblem, before: Tensor | None, after: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output (B, H, M, Dv) in the dtype of the values, and log-sum-exp (B, H, M) in float32."""
    batch, heads, rows, _ = part.query.shape
    output = part.value.new_empty(batch, heads, rows, part.value.shape[-1])
    lse = part.value.new_empty(batch, heads, rows, dtype=torch.float32)
    results = {"result": rows_struct(output), "lse": rows_struct(lse)}
    work, _held = _arguments(part, before, after, batch * -(-rows // BLOCK), results, {"value_rows": _rows(part.value)})
    run_units(library.current().mixed_heads, work, thread_count(part.flops(), LEAST_WORK))
    return (output, lse) if work.tiles.nonfinite else CheckedRows((output, lse))


def backward(
    part: FlashProblem, before: Tensor | None, after: Tensor | None, saved: Saved
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], list[Tensor]]:
    """The gradients of query, key and value, and, if requested, of each diagonal, (H, M + N - 1), in float32.

    Beside them those of the matrices that there are, (padded heads, padded heads).
    """
    (batch, heads, rows, dim), (shared, columns, value_dim) = part.query.shape, part.value.shape[1:]
    threads = thread_count(part.flops(), LEAST_WORK)
    size = 4 * max(batch * shared * columns, 1) * (_padded(dim) + _padded(value_dim))
    # Parts of the rows each sum up gradients of all keys: as many as there are threads for, and memory.
    parts = max(min(-(-rows // BLOCK), -(-threads // max(batch, 1)), MOST_SUMS // size), 1)
    query = _zeros(batch, heads, rows, dim)
    key, value = (_zeros(parts * batch, shared, columns, size) for size in (dim, value_dim))
    line = torch.zeros(batch, heads, parts, max(rows + columns - 1, 0)) if saved.needs_bias_grad else None
    of_matrices = [None if each is None else torch.zeros(parts, batch, *each.shape) for each in (before, after)]
    keep_probability = 1.0 if part.dropout is None else part.dropout.keep_probability
    lse = saved.lse.contiguous()
    fields = {"lse": rows_struct(lse), "grad_relative_bias": None if line is None else line.data_ptr()}
    packed = {
        "key_rows": _rows(part.key),
        "value_columns": _columns(part.value),
        "grad_output": _rows(saved.grad_output, 1.0 / keep_probability),
        "grad_query": query,
        "grad_key": key,
        "grad_value": value,
        "grad_before": of_matrices[0],
        "grad_after": of_matrices[1],
    }
    work, _held = _arguments(part, before, after, batch * parts, fields, packed)
    work.row_parts = parts
    run_units(library.current().mixed_heads_backward, work, threads)
    if parts > 1:
        key, value = (each.unflatten(0, (parts, batch)).sum(0) for each in (key, value))
    gradients = (
        query[:, :, :rows, :dim] * part.scale,
        key[:, :, :columns, :dim] * LN_2,
        value[:, :, :columns, :value_dim],
        None if line is None else line.sum((0, 2)),
    )
    factors = LN_2, 1.0  # scores are in units of log2(e)
    totals = (None if each is None else each.sum((0, 1)) * by for each, by in zip(of_matrices, factors, strict=True))
    return gradients, [each for each in totals if each is not None]


def _arguments(
    part: FlashProblem,
    before: Tensor | None,
    after: Tensor | None,
    units: int,
    fields: dict[str, Any],
    others: Mapping[str, Tensor | None],
) -> tuple[MixedHeadsStruct, list[Any]]:
    """The C structure, and the objects that own its memory; fields: of its tiles. others: packed tensors."""
    packed = {
        "before": before,
        "after": after,
        "query": _rows(part.query, part.scale / LN_2),
        "key_columns": _columns(part.key),
        **others,
    }
    tiles, held = part.arguments(units, **fields)
    work = MixedHeadsStruct(
        tiles=tiles,
        padded_heads=-(-part.query.shape[1] // GROUP) * GROUP,
        padded_dim=_padded(part.query.shape[-1]),
        padded_value_dim=_padded(part.value.shape[-1]),
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in packed.items()},
    )
    return work, [held, packed]


def _enlarged(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """The tensor with so many more rows and columns of 0."""
    return pad(tensor, (0, columns, 0, rows)) if rows or columns else tensor


def _padded(dim: int) -> int:
    return -(-dim // PAIR) * PAIR


def _zeros(batch: int, heads: int, length: int, dim: int) -> Tensor:
    """Zeros for packed rows."""
    return torch.zeros(batch, heads, -(-length // BLOCK) * BLOCK, _padded(dim))


def _rows(tensor: Tensor, factor: float = 1.0) -> Tensor:
    """Rows times a factor in float32, with 0 up to whole blocks and pairs of vectors: (B, H, M', D')."""
    length, dim = tensor.shape[-2:]
    rows = tensor.detach().float()
    return _enlarged(rows if factor == 1.0 else rows * factor, -length % BLOCK, _padded(dim) - dim).contiguous()


def _columns(tensor: Tensor) -> Tensor:
    """Rows in float32 as the columns of blocks, with 0 up to whole blocks: (B, H, blocks, D, BLOCK)."""
    rows = _enlarged(tensor.detach().float(), -tensor.shape[-2] % BLOCK, 0)
    return rows.unflatten(-2, (-1, BLOCK)).mT.contiguous()
