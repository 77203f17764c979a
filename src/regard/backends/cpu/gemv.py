"""Matrix-vector products: a few rows times a matrix that is read once. The structure is explained in gemv.h."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from . import library
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous
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


def matmul_few_rows(rows: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_rj = Σ_a rows_ra · matrix_ja + bias_j, (..., N) in the dtype of the rows, summed in float32.

    rows (..., D), matrix (N, D) and bias (N,), all of one of `DTYPES`, on the CPU, of any strides. The matrix is
    read once for all rows: it is for few of them. Autograd sees nothing of it.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    _check(rows, matrix, bias)
    code = library.current()
    columns, dim = matrix.shape
    inputs, matrix = rows.float().contiguous(), last_contiguous(matrix)
    bias = None if bias is None else bias.float().contiguous()
    output = torch.empty((*rows.shape[:-1], columns), device="cpu")
    unit = max(UNIT // max(dim * matrix.element_size(), 1), 1)
    work = GemvStruct(
        *(0, -(-columns // unit), unit, math.prod(rows.shape[:-1]), columns, dim, DTYPES.index(matrix.dtype)),
        *(inputs.data_ptr(), dim, matrix.data_ptr(), matrix.stride(0)),
        *(None if bias is None else bias.data_ptr(), output.data_ptr()),
    )
    run_units(code.gemv, work, thread_count(matrix.numel(), LEAST_WORK))
    return output if rows.dtype is torch.float32 else output.to(rows.dtype)


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
