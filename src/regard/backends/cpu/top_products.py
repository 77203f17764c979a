"""The largest products of each row with the columns of a matrix; the structure is explained in top_products.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from . import library
from .gru_decoder import unit_rows
from .panels import PackedMatrix, PackedMatrixStruct
from .threads import run_units, thread_count

LEAST_WORK = 2**20
"""The fewest multiplications a thread."""


class TopProductsStruct(ctypes.Structure):
    """The structure `top_products` of top_products.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "unit")),
        *(("rows", c_int64), ("count", c_int64), ("left", c_void_p), ("matrix", PackedMatrixStruct)),
        *((name, c_void_p) for name in ("values", "indices", "lse")),
    )


def top_products(left: Tensor, matrix: PackedMatrix, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest of x Wᵀ + b for each row, their columns, and the log-sum-exp (R, 1), as `top_entries`.

    left (R, terms), count at most the columns; autograd sees nothing of it.
    """
    left, rows = left.detach().contiguous(), len(left)
    values, lse = left.new_empty(rows, count), left.new_empty(rows, 1)
    indices = torch.empty(rows, count, dtype=torch.int64)
    threads = thread_count(rows * matrix.terms * matrix.columns, LEAST_WORK)
    unit = unit_rows(rows, threads)
    work = TopProductsStruct(
        *(0, -(-rows // unit), 0, unit, rows, count, left.data_ptr(), matrix.struct()),
        *(values.data_ptr(), indices.data_ptr(), lse.data_ptr()),
    )
    run_units(library.current().top_products, work, threads)
    return values, indices, lse
