"""Sparsemax and entmax-1.5 in C over the tiles of a mask: one pass over the keys, then the keys with weight alone."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int64
from dataclasses import replace

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import CheckedRows
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...normalizers.entmax import threshold_alpha
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
from .library import last_contiguous
from .threads import run_units, thread_count

ROW_BLOCKS = 1
"""Blocks of rows in a unit of work: where most keys have weight, the lists of those of more rows leave the cache."""


class ThresholdStruct(TileWork, ctypes.Structure):
    """The structure `threshold` of threshold.h."""

    _fields_ = (
        ("tiles", FlashStruct),
        *((name, c_int64) for name in ("squared", "row_parts", "grad_key_part", "grad_value_part")),
        ("score_scale", c_float),
    )


class ThresholdsInC:
    """Sparsemax and entmax-1.5 by one call of C for each slice of batches with the same tiles."""

    def why_not(self, problem: Problem) -> list[str]:
        """Other normalizers, a softcap, sinks, and what the code over tiles has no bias or mask for."""
        reasons = []
        if threshold_alpha(problem.normalizer) is None:
            reasons.append("its code computes normalizers.Sparsemax, and normalizers.Entmax of the number 1.5")
        return reasons_of_tiles(problem, reasons)

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs whose scores are computed."""
        return FlashInC().visited_pairs(problem)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and thresholds of a batched problem."""
        normalizer = batched.problem.normalizer
        return batched.join_batches([(batch, forward(part, normalizer)) for batch, part in tile_problems(batched)])

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem; `Saved.lse` has the thresholds."""
        normalizer, results = batched.problem.normalizer, []
        for batch, part in tile_problems(batched):
            own = saved.part(batch)
            found = backward(part, normalizer, own.lse, own.grad_output, wants_relative_bias=saved.needs_bias_grad)
            results.append((batch, found))
        return joined_gradients(batched, saved, results)


def forward(part: FlashProblem, normalizer: Normalizer | None) -> tuple[Tensor, Tensor]:
    """Output (B, H, M, Dv) and thresholds (B, H, M) in float32, of scores times α - 1."""
    batch, heads, rows, _ = part.query.shape
    output = part.value.new_empty(batch, heads, rows, part.value.shape[-1])
    thresholds = part.value.new_empty(batch, heads, rows, dtype=torch.float32)
    threads = thread_count(part.flops(), LEAST_WORK)
    units = batch * heads * -(-rows // (ROW_BLOCKS * BLOCK))
    scaled, squared = _scaled(part, normalizer)
    results = {"result": rows_struct(output), "lse": rows_struct(thresholds)}
    tiles, _held = scaled.arguments(units, row_blocks=ROW_BLOCKS, **results)
    work = ThresholdStruct(tiles=tiles, squared=squared)
    run_units(library.current().threshold, work, threads)
    return (output, thresholds) if work.tiles.nonfinite else CheckedRows((output, thresholds))


def backward(
    part: FlashProblem,
    normalizer: Normalizer | None,
    thresholds: Tensor,
    grad_output: Tensor,
    *,
    wants_relative_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key and value, and, if requested, of each diagonal, (H, M + N - 1), in float32."""
    (batch, heads, rows, dim), (shared, columns, value_dim) = part.query.shape, part.value.shape[1:]
    threads = thread_count(part.flops(), LEAST_WORK)
    blocks = max(-(-rows // (ROW_BLOCKS * BLOCK)), 1)
    # Parts of the rows each sum up gradients of all keys: only where key heads alone keep too few threads busy.
    parts = min(blocks, -(-2 * threads // max(batch * shared, 1))) if batch * shared < threads else 1
    query = thresholds.new_zeros(batch, heads, rows, dim)
    key, value = (thresholds.new_zeros(parts, batch, shared, columns, size) for size in (dim, value_dim))
    line = thresholds.new_zeros(batch, heads, parts, max(rows + columns - 1, 0)) if wants_relative_bias else None
    grad_output, thresholds = last_contiguous(grad_output.to(part.value.dtype)), thresholds.contiguous()
    scaled, squared = _scaled(part, normalizer)
    tiles, _held = scaled.arguments(
        batch * shared * parts,
        row_blocks=ROW_BLOCKS,
        lse=rows_struct(thresholds),
        grad_output=rows_struct(grad_output),
        grad_query=rows_struct(query),
        grad_key=rows_struct(key[0]),
        grad_value=rows_struct(value[0]),
        grad_relative_bias=None if line is None else line.data_ptr(),
    )
    strides = {"grad_key_part": key.stride(0), "grad_value_part": value.stride(0)}
    work = ThresholdStruct(tiles=tiles, squared=squared, row_parts=parts, score_scale=part.scale, **strides)
    run_units(library.current().threshold_backward, work, threads)
    return query, _sum_of_parts(key), _sum_of_parts(value), None if line is None else line.sum((0, 2))


def _sum_of_parts(gradients: Tensor) -> Tensor:
    return gradients[0] if len(gradients) == 1 else gradients.sum(0)


def _scaled(part: FlashProblem, normalizer: Normalizer | None) -> tuple[FlashProblem, bool]:
    """The problem of scores times α - 1, in the units of flash.h; and whether weights are squares."""
    alpha = threshold_alpha(normalizer) or 2.0
    factor = (alpha - 1.0) * math.log(2.0)
    bias = None if part.relative_bias is None else part.relative_bias * factor
    return replace(part, scale=part.scale * factor, relative_bias=bias), alpha == 1.5
