"""Matrix-vector products: a few rows times a matrix that is read once. The structure is explained in gemv.h."""

from __future__ import annotations

import ctypes
import math
from array import array
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from . import library
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous, places_of
from .threads import run_units, thread_count

UNIT = 2**18
"""Bytes of the matrix that a thread takes at once."""

LEAST_WORK = 2**18
"""Entries of the matrix that are worth a thread of their own: some 50 microseconds."""


class GemvStruct(ctypes.Structure):
    """The structure `gemv` of gemv.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "unit", "rows", "columns", "dim", "dtype")),
        *(("input", c_void_p), ("input_row", c_int64), ("matrix", c_void_p), ("matrix_row", c_int64)),
        *(("bias", c_void_p), ("output", c_void_p)),
    )


INPUT, MATRIX, MATRIX_ROW = places_of(GemvStruct, "input", "matrix", "matrix_row")
BIAS, OUTPUT = places_of(GemvStruct, "bias", "output")


@dataclass(frozen=True, eq=False, slots=True)
class FewRowsLayout:
    """What products of tensors of the same shapes, strides and dtypes have in common, on the same number of threads.

    numbers: the structure as 64-bit numbers, 0 for what is known in the call. shape: of the output. as_given: whether C
    reads the tensors as they are.
    """

    numbers: array[int]
    shape: tuple[int, ...]
    threads: int
    as_given: bool

    @classmethod
    def of(cls, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> FewRowsLayout:
        """The layout of such tensors.

        Raises:
            ShapeError, DtypeError, DeviceError: as `matmul_few_rows`.
        """
        _check(rows, matrix, bias)
        columns, dim = matrix.shape
        unit = max(UNIT // max(dim * matrix.element_size(), 1), 1)
        work = GemvStruct(
            *(0, -(-columns // unit), unit, math.prod(rows.shape[:-1]), columns, dim, DTYPES.index(matrix.dtype)),
            *(None, dim),
        )
        whole = rows.is_contiguous() and (bias is None or bias.is_contiguous())
        as_given = whole and rows.dtype is torch.float32 and last_contiguous(matrix) is matrix
        threads = thread_count(matrix.numel(), LEAST_WORK)
        return cls(array("q", bytes(work)), (*rows.shape[:-1], columns), threads, as_given)

    def multiply(self, rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product of tensors of this layout, as `matmul_few_rows`."""
        code, dtype = library.current(), rows.dtype
        if not self.as_given:
            rows, matrix = rows.float().contiguous(), last_contiguous(matrix)
            bias = None if bias is None else bias.float().contiguous()
        output, numbers = torch.empty(self.shape, device="cpu"), array("q", self.numbers)
        numbers[INPUT], numbers[MATRIX], numbers[MATRIX_ROW] = rows.data_ptr(), matrix.data_ptr(), matrix.stride(0)
        numbers[OUTPUT] = output.data_ptr()
        if bias is not None:
            numbers[BIAS] = bias.data_ptr()
        if self.threads == 1:
            code.gemv(numbers.buffer_info()[0])
        else:
            run_units(code.gemv, GemvStruct.from_buffer(numbers), self.threads)
        return output if dtype is torch.float32 else output.to(dtype)


def matmul_few_rows(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_rj = Σ_a rows_ra · matrix_ja + bias_j, (..., N) in the dtype of the rows, summed in float32.

    rows (..., D), matrix (N, D) and bias (N,), all of one of `DTYPES`, on the CPU, of any strides. The matrix is
    read once for all rows: it is for few of them. Autograd sees nothing of it.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    return FewRowsLayout.of(rows, matrix, bias).multiply(rows, matrix, bias)


def _check(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("rows", rows), ("matrix", matrix), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_cpu:
            check_cpu(name, tensor)
        if tensor.dtype not in DTYPES or tensor.dtype is not rows.dtype:
            raise DtypeError(
                f"rows are {rows.dtype} and {name} is {tensor.dtype}; native code takes all as {DTYPE_NAMES}"
            )
    if rows.ndim < 1 or matrix.ndim != 2 or rows.shape[-1] != matrix.shape[1]:
        raise ShapeError(
            f"rows have the shape {tuple(rows.shape)} and matrix {tuple(matrix.shape)}; they need (..., dim) and "
            "(columns, dim), with the same dim"
        )
    if bias is not None and tuple(bias.shape) != (matrix.shape[0],):
        raise ShapeError(f"bias has the shape {tuple(bias.shape)}; it needs ({matrix.shape[0]},)")
