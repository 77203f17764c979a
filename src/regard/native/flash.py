"""Dot-product attention over the tiles that a mask leaves, forward and backward, by the C functions of `library`.

The layouts and what the fields of the structure mean are in flash.h.
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
from .library import DTYPES, check_cpu, last_contiguous
from .threads import together, workers

BLOCK = 64  # flash.h has the same, and the next one
MOST_BLOCKS = 8
BLOCKS = 4
"""Blocks of rows that are taken at once where there are enough for all threads: keys are laid out once for them."""

LEAST_WORK = 2**21
"""Flops that are worth a thread of their own: some 10 microseconds."""


class _Rows(ctypes.Structure):
    _fields_ = (("at", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


class FlashWork(ctypes.Structure):
    """The structure of flash.h."""

    _fields_ = (
        *((name, c_int64) for name in ("taken", "units", "failed")),
        *((name, c_int64) for name in ("heads", "group", "rows", "columns", "dim", "value_dim", "narrow", "segment")),
        *(("scale", c_float), ("softcap", c_float), ("query", _Rows), ("key", _Rows), ("value", _Rows)),
        *(("first", c_void_p), ("runs", c_void_p), ("bits", c_void_p), ("bits_batch", c_int64)),
        *(("bits_head", c_int64), ("line", c_void_p), ("line_head", c_int64)),
        *(("row_noise", c_void_p), ("column_noise", c_void_p), ("threshold", c_int64), ("kept_share", c_float)),
        *(("result", c_void_p), ("lse", c_void_p), ("output", _Rows), ("grad_output", _Rows)),
        *((name, c_void_p) for name in ("grad_lse", "grad_query", "grad_key", "grad_value", "grad_line")),
        *((name, _Rows) for name in ("keep", "weights", "terms")),
        ("reductions", c_void_p),
    )


@dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """Which tiles of BLOCK × BLOCK pairs are visited, and which of their pairs exist.

    Shapes: first (R + 1,) int64: the runs of block row r are first[r] to first[r + 1]. runs (·, 3) int64: the first
    column, a multiple of BLOCK, the column after the last, and the number of the first tile among those with bits; -1
    where all pairs exist. bits (B or 1, H or 1, T, BLOCK) uint64: a word for each row of a tile, its lowest bit the
    first column's.
    """

    first: np.ndarray
    runs: np.ndarray
    bits: np.ndarray


@dataclass(frozen=True, eq=False, slots=True)
class Drops:
    """Which weights are dropped: those of whose row and column the mixed sum is below the threshold.

    Shapes: rows (B, H, M), columns (N,), int32, by `Dropout.hashes`. kept_share: the probability of
    being kept, which the others are divided by.
    """

    rows: Tensor
    columns: Tensor
    threshold: int
    kept_share: float


@dataclass(frozen=True, eq=False, slots=True)
class FlashProblem:
    """s_ij = softcap(scale · q_i · k_j) + b_(j-i), over the pairs of `tiles`: what both passes start from.

    query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), all float32 or all bfloat16, on the CPU, of any strides
    but in the last axis, where what is not contiguous is copied; Hk divides H. softcap: c · tanh(s / c). line: b, (1 or
    H, M + N - 1) float32, from the last query's first key on. It is computed in float32. Autograd sees nothing of it.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    tiles: Tiles
    softcap: float | None = None
    line: Tensor | None = None
    drops: Drops | None = None

    def __post_init__(self) -> None:
        _check(self.query, self.key, self.value, self.line)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Σ_j exp(s_ij - lse_i) · v_j, (B, H, M, Dv) as the value, and lse = log Σ exp(s_ij), (B, H, M) in float32.

        Weights are dropped from the first sum, not from the second.

        Rows that attend to nothing have 0 and -inf. NaN in what a row meets gives NaN, and so does NaN in a value of
        weight 0.
        """
        code = library.current()
        batch, heads, rows, _ = self.query.shape
        output = self.value.new_empty(batch, heads, rows, self.value.shape[-1])
        lse = self.value.new_empty(batch, heads, rows, dtype=torch.float32)
        threads = workers(self.flops(), LEAST_WORK)
        units, segment = shares(batch * heads, rows, 4 * threads)
        work, _held = self.arguments(units, segment, result=output.data_ptr(), lse=lse.data_ptr())
        together(code.flash, work, threads)
        return output, lse

    def backward(
        self, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None, *, wants_line: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key, value and, if that is wanted, line, in float32 and in their shapes.

        output and grad_output as the value in all but length; lse and grad_lse (B, H, M) float32, the former +inf for
        rows that take no part, the latter None for 0.
        """
        code = library.current()
        (batch, heads, rows, dim), (shared, columns, value_dim) = self.query.shape, self.value.shape[1:]
        threads = workers(self.flops(), LEAST_WORK)
        blocks = max(-(-columns // BLOCK), 1)
        # Parts of the keys each sum up gradients of all queries: only where the heads alone keep too few threads busy.
        parts = min(blocks, max(1, -(-2 * threads // max(batch * shared, 1)))) if batch * shared < threads else 1
        query = torch.zeros(batch, heads, parts, rows, dim)
        key, value = torch.empty(batch, shared, columns, dim), torch.empty(batch, shared, columns, value_dim)
        line = torch.zeros(batch, heads, parts, rows + columns - 1) if wants_line and self.line is not None else None
        output, grad_output = last_contiguous(output), last_contiguous(grad_output.to(self.value.dtype))
        lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
        work, _held = self.arguments(
            batch * shared * parts,
            parts,
            lse=lse.data_ptr(),
            output=place(output),
            grad_output=place(grad_output),
            grad_lse=None if grad_lse is None else grad_lse.data_ptr(),
            grad_query=query.data_ptr(),
            grad_key=key.data_ptr(),
            grad_value=value.data_ptr(),
            grad_line=None if line is None else line.data_ptr(),
        )
        together(code.flash_backward, work, threads)
        if line is not None and self.line is not None:
            line = line.sum((0, 2)).sum_to_size(self.line.shape)
        return query.sum(2) if parts > 1 else query.squeeze(2), key, value, line

    def flops(self) -> int:
        """About how many a forward pass takes."""
        runs = self.tiles.runs
        pairs = int((runs[:, 1] - runs[:, 0]).sum()) * BLOCK * self.query.shape[0] * self.query.shape[1]
        return 2 * pairs * (self.query.shape[-1] + self.value.shape[-1])

    def arguments(self, units: int, segment: int, **given: Any) -> tuple[FlashWork, list[Any]]:
        """The structure, and what has to live as long as it is used."""
        query, key, value = (last_contiguous(tensor.detach()) for tensor in (self.query, self.key, self.value))
        line = None if self.line is None else (self.line.detach() * math.log2(math.e)).contiguous()
        tiles, noise = self.tiles, self._noise()
        (batches, bit_heads, count, _), words = tiles.bits.shape, BLOCK
        work = FlashWork(
            taken=0,
            units=units,
            failed=0,
            heads=query.shape[1],
            group=query.shape[1] // max(key.shape[1], 1),
            rows=query.shape[2],
            columns=key.shape[2],
            dim=query.shape[3],
            value_dim=value.shape[3],
            narrow=value.dtype == torch.bfloat16,
            segment=segment,
            scale=self.scale,
            softcap=self.softcap or 0.0,
            query=place(query),
            key=place(key),
            value=place(value),
            first=tiles.first.ctypes.data,
            runs=tiles.runs.ctypes.data,
            bits=tiles.bits.ctypes.data,
            bits_batch=bit_heads * count * words if batches > 1 else 0,
            bits_head=count * words if bit_heads > 1 else 0,
            line=None if line is None else line.data_ptr(),
            line_head=0 if line is None or line.shape[0] == 1 else line.shape[1],
            row_noise=None if noise is None else noise[0].data_ptr(),
            column_noise=None if noise is None else noise[1].data_ptr(),
            threshold=0 if self.drops is None else self.drops.threshold,
            kept_share=1.0 if self.drops is None else self.drops.kept_share,
            **given,
        )
        return work, [query, key, value, line, noise]

    def _noise(self) -> tuple[Tensor, Tensor] | None:
        """Of rows and of columns; of the latter there are more, for what is read beyond them."""
        if self.drops is None:
            return None
        return self.drops.rows.contiguous(), torch.nn.functional.pad(self.drops.columns, (0, BLOCK))


def shares(heads: int, rows: int, wanted: int) -> tuple[int, int]:
    """The units that the rows of all heads make, and the blocks in each: BLOCKS, or fewer for as many as wanted."""
    blocks = -(-rows // BLOCK)
    segment = max(min(BLOCKS, heads * blocks // wanted), 1)
    return heads * -(-blocks // segment), segment


def place(tensor: Tensor) -> _Rows:
    """Where a tensor (B, H, ·, ·) lies."""
    return _Rows(tensor.data_ptr(), *tensor.stride()[:3])


def _check(query: Tensor, key: Tensor, value: Tensor, line: Tensor | None) -> None:
    for name, tensor in {"query": query, "key": key, "value": value, "line": line}.items():
        if tensor is None:
            continue
        check_cpu(name, tensor)
        if name != "line" and tensor.ndim != 4:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs four axes: batch, heads, length, dim")
    if value.dtype not in DTYPES or query.dtype != value.dtype or key.dtype != value.dtype:
        raise DtypeError(
            f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; native code takes all as torch.float32 "
            "or all as torch.bfloat16"
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
    if line is not None and (line.shape[0] not in (1, heads) or line.shape[1:] != (rows + columns - 1,)):
        raise ShapeError(
            f"line has shape {tuple(line.shape)}; {rows} queries and {columns} keys need {(heads, rows + columns - 1)}"
        )
