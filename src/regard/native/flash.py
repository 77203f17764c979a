"""Dot-product attention over the tiles of a mask: forward, backward, and the weights from the log-sum-exp.

The structures and their layouts are explained in flash.h.
"""

from __future__ import annotations

import ctypes
import math
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous, new_large
from .threads import run_units, thread_count

BLOCK = 64
"""Rows and columns of a tile, as in flash.h."""
MOST_BLOCKS = 8
"""The size of arrays in C, as in flash.h: more blocks of rows in a unit of work than `ROW_BLOCKS` ever makes."""
ROW_BLOCKS = 4
"""Blocks of rows in a unit of work where there are enough for all threads; a block of keys is packed once for them."""

LEAST_WORK = 2**21
"""The fewest flops a thread: with twice as many the work is shared. It takes some 10 microseconds."""


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
        *(("row_hashes", c_void_p), ("column_hashes", c_void_p), ("threshold", c_int64), ("keep_probability", c_float)),
        *(("accumulate", c_int64), ("result", RowsStruct), ("lse", RowsStruct)),
        *(("output", RowsStruct), ("grad_output", RowsStruct), ("grad_lse", c_void_p), ("grad_query", RowsStruct)),
        *(("grad_query_part", c_int64), ("grad_key", RowsStruct), ("grad_value", RowsStruct)),
        ("grad_relative_bias", c_void_p),
        *((name, RowsStruct) for name in ("keep", "weights", "entropy_terms")),
        ("reductions", c_void_p),
    )


@dataclass(frozen=True, eq=False, slots=True)
class FlashTiles:
    """The tiles of BLOCK × BLOCK pairs with unmasked pairs, and which of their pairs exist.

    Shapes: first (R + 1,) int64: the runs of block row r are first[r] to first[r + 1]. runs (·, 3) int64: the first
    column, a multiple of BLOCK, the column after the last, and the number of the first tile among those with bits; -1
    where all pairs exist. bits (B or 1, H or 1, T, BLOCK) uint64: a word for each row of a tile, its lowest bit the
    first column's.
    """

    first: np.ndarray
    runs: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class DropoutHashes:
    """Dropout of weights: those whose mixed sum of the hashes of row and column is below the threshold are 0.

    Shapes: rows (B, H, M), columns (N,), int32, by `Dropout.hashes`. keep_probability: what
    the other weights are divided by.
    """

    rows: Tensor
    columns: Tensor
    threshold: int
    keep_probability: float


class FiniteRows(tuple[Tensor, Tensor]):
    """Output and log-sum-exp of a forward pass that wrote neither NaN nor infinity into the output."""

    __slots__ = ()


class FiniteGradients(tuple[Tensor, Tensor, Tensor, Tensor | None]):
    """Gradients of a backward pass that wrote neither NaN nor infinity into those of query, key and value."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, slots=True)
class FlashProblem:
    """s_ij = softcap(scale · q_i · k_j) + b_(j-i), over the pairs of `tiles`: the inputs of both passes.

    query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), all of one of `DTYPES`, on the CPU, of any strides
    but in the last axis, where what is not contiguous is copied; Hk divides H. softcap: c · tanh(s / c).
    relative_bias: b, (1 or H, M + N - 1) float32, from the last query's first key on. Computed in float32, without
    autograd.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    tiles: FlashTiles
    softcap: float | None = None
    relative_bias: Tensor | None = None
    dropout: DropoutHashes | None = None

    def __post_init__(self) -> None:
        _check(self.query, self.key, self.value, self.relative_bias)

    def forward(self, into: tuple[Tensor, Tensor] | None = None, *, accumulate: bool = False) -> tuple[Tensor, Tensor]:
        """Σ_j exp(s_ij - lse_i) · v_j, (B, H, M, Dv) as the value, and lse = log Σ exp(s_ij), (B, H, M) in float32.

        Weights are dropped from the first sum, not from the second.

        into: where they are written, of any strides but in the output's last axis. accumulate: there is the output and
        log-sum-exp of other keys, both float32, and they become those of all keys together.

        Rows that attend to nothing have 0 and -inf. NaN in what a row meets gives NaN, and so does NaN in a value of
        weight 0. If all entries of the output that are written are finite, the result is `FiniteRows`.
        """
        code = library.current()
        batch, heads, rows, _ = self.query.shape
        output, lse = into or (
            new_large(self.value, batch, heads, rows, self.value.shape[-1]),
            self.value.new_empty(batch, heads, rows, dtype=torch.float32),
        )
        threads = thread_count(self.flops(), LEAST_WORK)
        units, row_blocks = split_rows(batch * heads, rows, 4 * threads)
        results = {"result": rows_struct(output), "lse": rows_struct(lse), "accumulate": accumulate}
        work, _held = self.arguments(units, row_blocks=row_blocks, **results)
        run_units(code.flash, work, threads)
        return (output, lse) if work.nonfinite else FiniteRows((output, lse))

    def backward(
        self,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        *,
        wants_relative_bias: bool = False,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        accumulate: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key, value and, if requested, relative_bias, in float32 and in their shapes.

        output and grad_output as the value in all but length; lse and grad_lse (B, H, M) float32, the former +inf for
        rows that take no part, the latter None for 0. into: gradients of query, key and value, float32 and of any
        strides but in the last axis, to which these are added; not `accumulate`: which they replace. If all entries of
        these three that are written are finite, the result is `FiniteGradients`.
        """
        code = library.current()
        (batch, heads, rows, dim), (shared, columns, value_dim) = self.query.shape, self.value.shape[1:]
        threads = thread_count(self.flops(), LEAST_WORK)
        blocks = max(-(-columns // BLOCK), 1)
        # Parts of the keys each sum up gradients of all queries: only where the heads alone keep too few threads busy.
        few_heads = batch * shared < threads and into is None
        parts = min(blocks, max(1, -(-2 * threads // max(batch * shared, 1)))) if few_heads else 1
        query = new_large(lse, parts, batch, heads, rows, dim) if into is None else into[0].unsqueeze(0)
        alternate = batch > 1 and self.query.stride(0) < self.query.stride(2)
        unit_batches = min(batch, -(-batch * shared // (2 * threads))) if alternate else 1
        key, value = (
            (new_large(lse, batch, shared, columns, dim), new_large(lse, batch, shared, columns, value_dim))
            if into is None
            else into[1:]
        )
        wants_bias = wants_relative_bias and self.relative_bias is not None
        bias = torch.zeros(batch, heads, parts, rows + columns - 1, device="cpu") if wants_bias else None
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
        run_units(code.flash_backward, work, threads)
        if bias is not None and self.relative_bias is not None:
            bias = bias.sum((0, 2)).sum_to_size(self.relative_bias.shape)
        gradients = query.sum(0) if parts > 1 else query[0], key, value, bias
        return gradients if work.nonfinite else FiniteGradients(gradients)

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
            row_hashes=None if hashes is None else hashes[0].data_ptr(),
            column_hashes=None if hashes is None else hashes[1].data_ptr(),
            threshold=0 if self.dropout is None else self.dropout.threshold,
            keep_probability=1.0 if self.dropout is None else self.dropout.keep_probability,
            **fields,
        )
        return work, [query, key, value, bias, hashes]

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


def write_weights(
    query: Tensor,
    key: Tensor,
    scale: float,
    lse: Tensor,
    weights: Tensor,
    *,
    entropy_terms: Tensor | None = None,
    keep: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """w_ij = exp(softcap(scale · q_i · k_j) - lse_i), 0 where `keep` is False, written into `weights` and returned.

    query (B, H, M, D) and key (B, Hk, N, D), both of one of `DTYPES`, Hk divides H; lse (B, H, M) float32, +inf
    for rows whose weights are to be 0; weights and entropy_terms (B, H, M, N) float32, whose last axis is contiguous;
    keep (B or 1, H or 1, M or 1, N or 1) bool. All are on the CPU. entropy_terms: w · log₂ w is written there.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    (batch, heads, rows, dim), (_, shared, columns, _) = query.shape, key.shape
    _check_weights(query, key, lse, weights, entropy_terms)
    query, key, lse = last_contiguous(query.detach()), last_contiguous(key.detach()), lse.contiguous()
    if keep is not None:
        keep = last_contiguous(keep.expand(*keep.shape[:3], columns)).expand(batch, heads, rows, columns)
    threads = thread_count(2 * batch * heads * rows * columns * dim, LEAST_WORK)
    units, row_blocks = split_rows(batch * heads, rows, 2 * threads)
    options: dict[str, Any] = {} if keep is None else {"keep": rows_struct(keep)}
    work = FlashStruct(
        unit_count=units if columns else 0,
        heads=heads,
        group=heads // max(shared, 1),
        rows=rows,
        columns=columns,
        dim=dim,
        dtype=DTYPES.index(query.dtype),
        row_blocks=row_blocks,
        scale=scale,
        softcap=softcap or 0.0,
        query=rows_struct(query),
        key=rows_struct(key),
        lse=rows_struct(lse),
        weights=rows_struct(weights),
        **(options if entropy_terms is None else options | {"entropy_terms": rows_struct(entropy_terms)}),
    )
    run_units(library.current().flash_weights, work, threads)
    return weights


def write_all(problem: FlashProblem, lse: Tensor, weights: Tensor) -> None:
    """w_ij = exp(s_ij - lse_i) for the pairs of the problem's tiles, written into zeros.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. weights (B, H, M, N) float32, contiguous.
    """
    batch, heads, rows, _ = problem.query.shape
    lse = torch.where(lse.isfinite(), lse, float("inf")).contiguous()
    threads = thread_count(problem.flops(), LEAST_WORK)
    units, row_blocks = split_rows(batch * heads, rows, 2 * threads)
    work, _held = problem.arguments(units, row_blocks=row_blocks, lse=rows_struct(lse), weights=rows_struct(weights))
    run_units(library.current().flash_weights, work, threads)


def _check_weights(query: Tensor, key: Tensor, lse: Tensor, weights: Tensor, entropy_terms: Tensor | None) -> None:
    named = {"query": query, "key": key, "lse": lse, "weights": weights}
    if entropy_terms is not None:
        named["entropy_terms"] = entropy_terms
    for name, tensor in named.items():
        check_cpu(name, tensor)
    if query.dtype not in DTYPES or key.dtype != query.dtype:
        raise DtypeError(f"query is {query.dtype} and key {key.dtype}; native code takes both as {DTYPE_NAMES}")
    (batch, heads, rows, dim), (columns, shared) = query.shape, (key.shape[2], key.shape[1])
    if heads % max(shared, 1):
        raise ShapeError(f"key has {shared} heads; they need to divide the {heads} query heads")
    wanted = {
        "key": (batch, shared, columns, dim),
        "lse": (batch, heads, rows),
        "weights": (batch, heads, rows, columns),
        "entropy_terms": (batch, heads, rows, columns),
    }
    for name, tensor in named.items():
        if name != "query" and tuple(tensor.shape) != wanted[name]:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {wanted[name]}")
        if name in ("lse", "weights", "entropy_terms") and tensor.dtype != torch.float32:
            raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32")
        if name in ("weights", "entropy_terms") and columns > 1 and tensor.stride(-1) != 1:
            raise ShapeError(f"{name} needs its last axis contiguous; its strides are {tensor.stride()}")
