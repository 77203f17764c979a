"""Flash attention in C over the tiles of a mask: what it cannot compute, its inputs, forward and backward.

A mask is one bit per pair of the tiles that it cuts. The structures and their layouts are explained in flash.h.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...biases import RelativeBias
from ...biases.base import bias_parts
from ...biases.distance_tables import CallBias
from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.dropout import DropoutHashes
from ...core.finite import CheckedGradients, CheckedRows
from ...core.large_results import LARGE_BYTES, new_large
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...errors import DtypeError, ShapeError
from ...normalizers import Sigmoid
from ...tiles.diagonals import bias_along
from ...tiles.landmark_blocks import LandmarkBlocks
from ...tiles.mask_tiles import TileLayout, sampled_layouts
from ...tiles.row_spans import has_spans
from ...tiles.tile_bits import BLOCK, MIN_FULL_RUN, TILE_SIZE, TileBits, all_tiles, masked_pairs, packed_tiles
from . import library
from .call_bias import CallBiasGradients, CallBiasTerms, add_bias_gradients, is_native
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous
from .threads import run_units, thread_count

MOST_BLOCKS = 8
"""The size of arrays in C, as in flash.h: more blocks of rows in a unit of work than `ROW_BLOCKS` ever makes."""
ROW_BLOCKS = 4
"""Blocks of rows in a unit of work where there are enough for all threads; a block of keys is packed once for them."""

LEAST_WORK = 2**21
"""The fewest flops a thread: with twice as many the work is shared. It takes some 10 microseconds."""


MAX_BITS = 2**31
"""Masked pairs for which bits are kept: 256 MiB of them."""
GROUP, NARROW = 16, 5 * TILE_SIZE[1]
"""Rows of a group where a block of rows has so many columns at most, as QUERIES and NARROW of narrow.h."""


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Those of query, key and value, and of each diagonal, (H, M + N - 1), where it is asked for."""


class FlashInC:
    """Attention over tiles by one call of C for each slice of batches with the same tiles.

    In float32, whatever comes in: 16 bits are widened as they are read. A mask is read as a bit for each pair of tiles
    that it cuts; a bias by distance and its gradient as one number for each diagonal.
    """

    normalizers: tuple[type[Normalizer], ...] = (Sigmoid,)

    def why_not(self, problem: Problem) -> list[str]:
        """Biases that the code does not add, and masks of too many bits."""
        if problem.bias is not None and not _has_native_bias(problem):
            return [
                "of all biases its code adds those by distance alone, forget gates, tables or vectors of queries and "
                "keys by distance, and landmarks, of consecutive positions"
            ]
        if problem.mask is not None and (pairs := masked_pairs(problem)) > MAX_BITS:
            return [f"the mask cuts tiles of {pairs:,} pairs, each of which would be kept as a bit"]
        return []

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem, slice by slice of batches with the same tiles."""
        return batched.join_batches([(batch, part.forward()) for batch, part in tile_problems(batched)])

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem, slice by slice of batches with the same tiles."""
        bias = batched.zero_bias_gradients() if saved.needs_bias_grad else ()
        call = CallBiasGradients.over(batched, bias) if bias else None
        results = [(batch, _gradients(part, saved.part(batch), call)) for batch, part in tile_problems(batched)]
        return joined_gradients(batched, saved, results, bias, call)

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis. Returns
        whether all entries of the output that were written are finite.
        """
        finite = True
        for batch, part in tile_problems(batched):
            rows = part.forward((output[batch], lse[batch]), accumulate=accumulate)
            finite = finite and isinstance(rows, CheckedRows)
        return finite

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients of a batched problem, or add them to those that stand there; of the bias, always add.

        Those of query, key and value are float32, of any strides but in the last axis. Returns whether all entries of
        these three that were written are finite.
        """
        finite, call = True, CallBiasGradients.over(batched, into.bias) if saved.needs_bias_grad else None
        for batch, part in tile_problems(batched):
            own = saved.part(batch)
            gradients = part.backward(
                own.output,
                own.lse,
                own.grad_output,
                own.grad_lse if own.has_lse_grad else None,
                wants_relative_bias=own.needs_bias_grad,
                call_gradients=call,
                into=(into.query[batch], into.key[batch], into.value[batch]),
                accumulate=accumulate,
            )
            finite = finite and isinstance(gradients, CheckedGradients)
            if saved.needs_bias_grad:
                add_bias_gradients(batched, gradients[3], None, into.bias)
        if call is not None:
            add_bias_gradients(batched, None, call, into.bias)
        return finite

    def visited_pairs(self, problem: Problem) -> float:
        """The pairs that are computed, over batches and heads; of a band fewer than its tiles have."""
        share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
        heads = problem.weights_shape[-3] if problem.heads else 1
        is_band = problem.mask is not None and has_spans(problem.mask, problem)
        pairs = 0.0
        for part in found:
            computed = _band_pairs(part.layout) if is_band else part.layout.visited_pairs
            pairs += heads * (part.batch.stop - part.batch.start) * computed
        return share * pairs


def reasons_of_tiles(problem: Problem, reasons: list[str]) -> list[str]:
    """These, and a softcap, sinks and biases of content, which code for other normalizers lacks; else what tiles do."""
    if problem.softcap is not None:
        reasons.append("its code has no softcap")
    if problem.sinks is not None:
        reasons.append("its code has no sinks")
    if has_call_bias(problem):
        reasons.append("of all biases its code adds those by distance alone")
    return reasons or FlashInC().why_not(problem)


def joined_gradients(
    batched: BatchedProblem,
    saved: Saved,
    results: Sequence[tuple[slice, Gradients]],
    bias: tuple[Tensor, ...] = (),
    call: CallBiasGradients | None = None,
) -> ProblemGradients:
    """The gradients of a batched problem from those of slices of its batches.

    bias: those of a bias, which the diagonals' and `call` are added to; without it they begin at 0.
    """
    if len(results) == 1:
        (query, key, value, _) = results[0][1]
        gradients = ProblemGradients(query, key, value, checked=isinstance(results[0][1], CheckedGradients))
    else:
        gradients = batched.zero_gradients()
        for batch, (query, key, value, _) in results:
            gradients.query[batch], gradients.key[batch], gradients.value[batch] = query, key, value
    line = _summed_line(results)
    if line is not None and saved.needs_normalizer_grad and batched.problem.normalizer is not None:
        (parameter,) = batched.problem.normalizer.parameters()
        of_heads = line.sum(-1)
        gradients = replace(gradients, normalizer=(of_heads if parameter.ndim else of_heads.sum(),))
    if saved.needs_bias_grad:
        bias = bias or batched.zero_bias_gradients()
        add_bias_gradients(batched, line, call, bias)
        gradients = replace(gradients, bias=bias)
    return gradients


def _summed_line(results: Sequence[tuple[slice, Gradients]]) -> Tensor | None:
    """The gradient of each diagonal, summed over slices of batches; None where none was asked for."""
    lines = [line for _, (_, _, _, line) in results if line is not None]
    return sum(lines[1:], lines[0]) if lines else None


def _line(problem: Problem) -> Tensor | None:
    """What biases by distance add on each diagonal, (1 or H, M + N - 1) in float32; None without such a bias."""
    lines = [bias_along(problem, part) for part in bias_parts(problem.bias) if isinstance(part, RelativeBias)]
    return sum(lines[1:], lines[0]).float() if lines else None


def _sigmoid_bias(batched: BatchedProblem) -> Tensor | None:
    """The bias of sigmoid attention for each head; None of softmax attention."""
    normalizer = batched.problem.normalizer
    if not isinstance(normalizer, Sigmoid):
        return None
    return normalizer.bias_of_heads(batched.shape[1], batched.value.device)


def tile_problems(batched: BatchedProblem) -> Iterator[tuple[slice, FlashProblem]]:
    """The native problem of each slice of batches with the same tiles."""
    pairs, problem = batched.pairs, batched.problem
    if not isinstance(pairs, DotPairs):
        raise TypeError("native code over tiles computes dot products")
    landmarks = line = terms = None
    if problem.bias is not None:
        landmarks = LandmarkBlocks.from_problem(problem)
    if problem.bias is not None and landmarks is None:
        line, terms = _line(problem), CallBiasTerms.from_problem(batched)
    width = BLOCK if landmarks is None else landmarks.tile_width
    if problem.mask is None:
        found = ((slice(0, batched.shape[0]), all_tiles(*batched.shape[2:], width)),)
    else:
        found = packed_tiles(batched, width)
    for batch, tiles in _one_by_one(found) if _differ_in_columns(batched) else found:
        own = pairs.query[batch], pairs.key[batch], batched.value[batch]
        dropped = _dropout_hashes(batched, batch)
        sigmoid, call = _sigmoid_bias(batched), None if terms is None else (terms, batch)
        yield batch, FlashProblem(*own, pairs.scale, tiles, problem.softcap, line, dropped, sigmoid, call, landmarks)


def _differ_in_columns(batched: BatchedProblem) -> bool:
    """Whether dropout hashes of columns differ between batches; native code reads one line of them for all."""
    return batched.problem.dropout is not None and batched.grid.key_positions.ndim > 1


def _one_by_one(found: Iterable[tuple[slice, TileBits]]) -> Iterator[tuple[slice, TileBits]]:
    """The tiles of each batch separately."""
    for batch, tiles in found:
        for at in range(batch.start, batch.stop):
            bits = tiles.bits if len(tiles.bits) == 1 else tiles.bits[at - batch.start : at - batch.start + 1]
            yield slice(at, at + 1), replace(tiles, bits=np.ascontiguousarray(bits))


def _dropout_hashes(batched: BatchedProblem, batch: slice) -> DropoutHashes | None:
    """The dropout hashes of some batches; None without dropout."""
    dropout = batched.problem.dropout
    if dropout is None:
        return None
    rows, columns = dropout.hashes(*batched.problem.dropout_indices(batched.grid, batch))
    return DropoutHashes(rows, columns.view(-1), dropout.threshold, 1.0 - dropout.probability)


def _has_native_bias(problem: Problem) -> bool:
    """Whether C adds the bias: over consecutive positions, of parts that it knows."""
    if LandmarkBlocks.from_problem(problem) is not None:
        return True
    some = problem.bias is not None and problem.queries > 0 and problem.keys > 0
    return some and problem.shift is not None and is_native(problem.bias)  # type: ignore[arg-type]


def has_call_bias(problem: Problem) -> bool:
    """Whether the bias has parts that the content of the call decides."""
    return any(isinstance(part, CallBias) for part in bias_parts(problem.bias))


def _band_pairs(layout: TileLayout) -> float:
    """The pairs that are computed for a mask whose rows are spans.

    Where a block of rows has few tiles side by side, these are of each GROUP of rows the columns that one of them
    attends to: about half of the tiles that the mask cuts, and one column more for each further row.
    """
    pairs = 0.0
    for row in layout.rows:
        wide = row.runs[-1].columns.stop - row.runs[0].columns.start if row.runs else 0
        widths = [(run.columns.stop - run.columns.start, run.masked) for run in row.runs]
        visited, cut = sum(width for width, _ in widths), sum(width for width, masked in widths if masked)
        few = visited - cut / 2 + GROUP - 1 if visited == wide <= NARROW else visited
        pairs += (row.rows.stop - row.rows.start) * min(visited, few)
    return pairs


def _gradients(part: FlashProblem, saved: Saved, call: CallBiasGradients | None) -> Gradients:
    grad_lse = saved.grad_lse if saved.has_lse_grad else None
    wants_line = saved.needs_normalizer_grad or (saved.needs_bias_grad and part.relative_bias is not None)
    return part.backward(
        *(saved.output, saved.lse, saved.grad_output, grad_lse), wants_relative_bias=wants_line, call_gradients=call
    )


class RowsStruct(ctypes.Structure):
    """The structure `rows` of flash.h."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


class FlashStruct(ctypes.Structure):
    """The structure `flash` of flash.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "nonfinite")),
        *((name, c_int64) for name in ("batches", "heads", "group", "rows", "columns", "dim", "value_dim")),
        ("dtype", c_int64),
        *(("row_blocks", c_int64), ("key_parts", c_int64), ("unit_batches", c_int64)),
        *(("scale", c_float), ("softcap", c_float), ("query", RowsStruct), ("key", RowsStruct), ("value", RowsStruct)),
        *(("first", c_void_p), ("runs", c_void_p), ("bits", c_void_p), ("bits_batch", c_int64)),
        *(("bits_head", c_int64), ("relative_bias", c_void_p), ("relative_bias_head", c_int64)),
        ("sigmoid_bias", c_void_p),
        *(("row_hashes", c_void_p), ("column_hashes", c_void_p), ("threshold", c_int64), ("keep_probability", c_float)),
        *(("accumulate", c_int64), ("result", RowsStruct), ("lse", RowsStruct)),
        *(("output", RowsStruct), ("grad_output", RowsStruct), ("grad_lse", c_void_p), ("grad_query", RowsStruct)),
        *(("grad_query_part", c_int64), ("grad_key", RowsStruct), ("grad_value", RowsStruct)),
        ("grad_relative_bias", c_void_p),
        *((name, RowsStruct) for name in ("keep", "weights", "entropy_terms")),
        *(("reductions", c_void_p), ("call_bias", c_void_p)),
        *((name, c_int64) for name in ("tile_columns", "landmark_size", "landmark_shift")),
    )


class TileWork:
    """A structure that begins with `tiles`, and is run in as many units."""

    tiles: FlashStruct

    @property
    def unit_count(self) -> int:
        """The number of units of work."""
        return self.tiles.unit_count

    @property
    def failed(self) -> int:
        """Whether there was no memory."""
        return self.tiles.failed


@dataclass(frozen=True, eq=False, slots=True)
class FlashProblem:
    """s_ij = softcap(scale · q_i · k_j) + b_(j-i), over the pairs of `tiles`: the inputs of both passes.

    query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), all of one of `DTYPES`, on the CPU, of any strides
    but in the last axis, where what is not contiguous is copied; Hk divides H. softcap: c · tanh(s / c).
    relative_bias: b, (1 or H, M + N - 1) float32, from the last query's first key on. sigmoid_bias: (H,); with it the
    weights are σ(s_ij + sigmoid_bias), and lse is the logarithm of their sum. call_bias: what the content of a call
    adds to the scores, and which of its batches these are. landmarks: the blocks of landmark attention, of which tiles
    have whole ones, and which has of all these no more than dropout. Computed in float32, without autograd.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    tiles: TileBits
    softcap: float | None = None
    relative_bias: Tensor | None = None
    dropout: DropoutHashes | None = None
    sigmoid_bias: Tensor | None = None
    call_bias: tuple[CallBiasTerms, slice] | None = None
    landmarks: LandmarkBlocks | None = None

    def __post_init__(self) -> None:
        _check(self.query, self.key, self.value, self.relative_bias)

    def forward(self, into: tuple[Tensor, Tensor] | None = None, *, accumulate: bool = False) -> tuple[Tensor, Tensor]:
        """Σ_j exp(s_ij - lse_i) · v_j, (B, H, M, Dv) as the value, and lse = log Σ exp(s_ij), (B, H, M) in float32.

        Weights are dropped from the first sum, not from the second.

        into: where they are written, of any strides but in the output's last axis. accumulate: there is the output and
        log-sum-exp of other keys, both float32, and they become those of all keys together.

        Rows that attend to nothing have 0 and -inf. NaN in what a row meets gives NaN, and so does NaN in a value of
        weight 0. If all entries of the output that are written are finite, the result is `CheckedRows`.
        """
        code = library.current()
        batch, heads, rows, _ = self.query.shape
        if into is not None:
            check_written(output=into[0])
        output, lse = into or (
            self._new_output(batch, heads, rows, self.value.shape[-1]),
            self.value.new_empty(batch, heads, rows, dtype=torch.float32),
        )
        threads = thread_count(self.flops(), LEAST_WORK)
        units, row_blocks = split_rows(batch * heads, rows, 4 * threads)
        results = {"result": rows_struct(output), "lse": rows_struct(lse), "accumulate": accumulate}
        work, _held = self.arguments(units, row_blocks=row_blocks, **results)
        _held += self._add_biases(work, None)
        run_units(code.flash, work, threads)
        return (output, lse) if work.nonfinite else CheckedRows((output, lse))

    def _new_output(self, *shape: int) -> Tensor:
        large = math.prod(shape) * self.value.element_size() >= LARGE_BYTES
        return new_large(self.value, *shape) if large else self.value.new_empty(shape)

    def backward(
        self,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        *,
        wants_relative_bias: bool = False,
        call_gradients: CallBiasGradients | None = None,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        accumulate: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key and value, and, if requested, of each diagonal, (H, M + N - 1), in float32.

        output and grad_output as the value in all but length; lse and grad_lse (B, H, M) float32, the former +inf for
        rows that take no part, the latter None for 0. into: gradients of query, key and value, float32 and of any
        strides but in the last axis, to which these are added; not `accumulate`: which they replace. If all entries of
        these three that are written are finite, the result is `CheckedGradients`.
        """
        code = library.current()
        (batch, heads, rows, dim), (shared, columns, value_dim) = self.query.shape, self.value.shape[1:]
        if into is not None:
            check_written(grad_query=into[0], grad_key=into[1], grad_value=into[2])
        threads = thread_count(self.flops(), LEAST_WORK)
        blocks = max(-(-columns // BLOCK), 1)
        # Parts of the keys each sum up gradients of all queries: only where the heads alone keep too few threads busy.
        # Tables of queries have one gradient each, which parts could not add to at the same time.
        few_heads = batch * shared < threads and into is None and self.call_bias is None
        parts = min(blocks, max(1, -(-2 * threads // max(batch * shared, 1)))) if few_heads else 1
        query = new_large(lse, parts, batch, heads, rows, dim) if into is None else into[0].unsqueeze(0)
        alternate = batch > 1 and self.query.stride(0) < self.query.stride(2)
        unit_batches = min(batch, -(-batch * shared // (2 * threads))) if alternate else 1
        key, value = (
            (new_large(lse, batch, shared, columns, dim), new_large(lse, batch, shared, columns, value_dim))
            if into is None
            else into[1:]
        )
        diagonals = max(rows + columns - 1, 0)
        bias = torch.zeros(batch, heads, parts, diagonals, device="cpu") if wants_relative_bias else None
        output, grad_output = last_contiguous(output), last_contiguous(grad_output.to(self.value.dtype))
        lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
        work, _held = self.arguments(
            -(-batch // max(unit_batches, 1)) * shared * parts,
            key_parts=parts,
            unit_batches=unit_batches,
            accumulate=into is not None and accumulate,
            lse=rows_struct(lse),
            output=rows_struct(output),
            grad_output=rows_struct(grad_output),
            grad_lse=None if grad_lse is None else grad_lse.data_ptr(),
            grad_query=rows_struct(query[0]),
            grad_query_part=query.stride(0),
            grad_key=rows_struct(key),
            grad_value=rows_struct(value),
            grad_relative_bias=None if bias is None else bias.data_ptr(),
        )
        _held += self._add_biases(work, call_gradients)
        run_units(code.flash_backward, work, threads)
        line = None if bias is None else bias.sum((0, 2))
        gradients = query.sum(0) if parts > 1 else query[0], key, value, line
        return gradients if work.nonfinite else CheckedGradients(gradients)

    def flops(self) -> int:
        """Floating-point operations of a forward pass, about."""
        runs = self.tiles.runs
        pairs = int((runs[:, 1] - runs[:, 0]).sum()) * BLOCK * self.query.shape[0] * self.query.shape[1]
        return 2 * pairs * (self.query.shape[-1] + self.value.shape[-1])

    def arguments(self, units: int, **fields: Any) -> tuple[FlashStruct, list[Any]]:
        """The C structure, and the objects that own its memory, to be referenced as long as it is used.

        fields: of the structure, those that differ between the passes.
        """
        query, key, value = (last_contiguous(tensor.detach()) for tensor in (self.query, self.key, self.value))
        bias = None if self.relative_bias is None else (self.relative_bias.detach() * math.log2(math.e)).contiguous()
        sigmoid = None if self.sigmoid_bias is None else (self.sigmoid_bias.detach() * math.log2(math.e)).contiguous()
        tiles, hashes = self.tiles, self._padded_hashes()
        (batches, bit_heads, count, _), words = tiles.bits.shape, BLOCK
        work = FlashStruct(
            next_unit=0,
            unit_count=units,
            failed=0,
            batches=query.shape[0],
            heads=query.shape[1],
            group=query.shape[1] // max(key.shape[1], 1),
            rows=query.shape[2],
            columns=key.shape[2],
            dim=query.shape[3],
            value_dim=value.shape[3],
            dtype=DTYPES.index(value.dtype),
            scale=self.scale,
            softcap=self.softcap or 0.0,
            query=rows_struct(query),
            key=rows_struct(key),
            value=rows_struct(value),
            first=tiles.first.ctypes.data,
            runs=tiles.runs.ctypes.data,
            bits=tiles.bits.ctypes.data,
            bits_batch=bit_heads * count * words if batches > 1 else 0,
            bits_head=count * words if bit_heads > 1 else 0,
            relative_bias=None if bias is None else bias.data_ptr(),
            relative_bias_head=0 if bias is None or bias.shape[0] == 1 else bias.shape[1],
            sigmoid_bias=None if sigmoid is None else sigmoid.data_ptr(),
            row_hashes=None if hashes is None else hashes[0].data_ptr(),
            column_hashes=None if hashes is None else hashes[1].data_ptr(),
            tile_columns=tiles.width,
            threshold=0 if self.dropout is None else self.dropout.threshold,
            keep_probability=1.0 if self.dropout is None else self.dropout.keep_probability,
            **fields,
        )
        return work, [query, key, value, bias, sigmoid, hashes]

    def _add_biases(self, work: FlashStruct, gradients: CallBiasGradients | None) -> list[Any]:
        """Enter what the content of the call does to the scores; returns the objects that own its memory."""
        if self.landmarks is not None:
            work.landmark_size, work.landmark_shift = self.landmarks.size, self.landmarks.shift
        if self.call_bias is None:
            return []
        terms, batch = self.call_bias
        struct, held = terms.struct(batch, gradients)
        work.call_bias = ctypes.addressof(struct)
        return [struct, *held]

    def _padded_hashes(self) -> tuple[Tensor, Tensor] | None:
        """The dropout hashes of rows and of columns, the latter padded, as C reads whole vectors."""
        if self.dropout is None:
            return None
        return self.dropout.rows.contiguous(), torch.nn.functional.pad(self.dropout.columns, (0, BLOCK))


def split_rows(heads: int, rows: int, wanted: int) -> tuple[int, int]:
    """The number of units of work, and the blocks of rows in each: ROW_BLOCKS, or fewer if more units are needed."""
    blocks = -(-rows // BLOCK)
    row_blocks = max(min(ROW_BLOCKS, heads * blocks // wanted), 1)
    return heads * -(-blocks // row_blocks), row_blocks


def rows_struct(tensor: Tensor) -> RowsStruct:
    """Address and strides of a tensor (B, H, ·, ·)."""
    return RowsStruct(tensor.data_ptr(), *tensor.stride()[:3])


def _check(query: Tensor, key: Tensor, value: Tensor, relative_bias: Tensor | None) -> None:
    for name, tensor in {"query": query, "key": key, "value": value, "relative_bias": relative_bias}.items():
        if tensor is None:
            continue
        check_cpu(name, tensor)
        if name != "relative_bias" and tensor.ndim != 4:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs four axes: batch, heads, length, dim")
    if value.dtype not in DTYPES or query.dtype != value.dtype or key.dtype != value.dtype:
        raise DtypeError(
            f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; native code takes all as {DTYPE_NAMES}"
        )
    (batch, heads, rows, dim), (columns, value_dim) = query.shape, value.shape[-2:]
    shared = key.shape[1]
    for name, tensor, wanted in (("key", key, dim), ("value", value, value_dim)):
        if tuple(tensor.shape) != (batch, shared, columns, wanted) or heads % max(shared, 1):
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; beside query {tuple(query.shape)} and value "
                f"{tuple(value.shape)} it needs {(batch, shared, columns, wanted)}, with key heads that divide the "
                f"{heads} query heads"
            )
    if relative_bias is not None and (
        relative_bias.shape[0] not in (1, heads) or relative_bias.shape[1:] != (rows + columns - 1,)
    ):
        raise ShapeError(
            f"relative_bias has shape {tuple(relative_bias.shape)}; {rows} queries and {columns} keys need "
            f"{(heads, rows + columns - 1)}"
        )


def check_written(**written: Tensor | None) -> None:
    """Check that C code can write each row of these tensors as one piece."""
    for name, tensor in written.items():
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(f"{name} needs its last axis contiguous; its strides are {tensor.stride()}")
