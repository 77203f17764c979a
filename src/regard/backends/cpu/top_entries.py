"""The largest entries of each row and its log-sum-exp in one pass; the structure is explained in top_entries.h."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from . import library
from .threads import run_units, thread_count

LEAST_WORK = 2**15
"""The fewest entries a thread."""


class TopEntriesStruct(ctypes.Structure):
    """The structure `top_entries` of top_entries.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "columns", "count")),
        *((name, c_void_p) for name in ("entries", "values", "indices", "lse")),
    )


def top_entries(entries: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` largest of each row (R, count), largest first, their indices (R, count) and the log-sum-exp (R, 1).

    entries (R, C), count at most C. In native code where they are float32 on the CPU, else in torch's; autograd sees
    nothing of it. Which of several equal entries are among the largest is left open.

    >>> values, indices, lse = top_entries(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    >>> values, indices
    (tensor([[2., 1.]]), tensor([[1, 2]]))
    """
    entries = entries.detach()
    if type(entries) is not Tensor or not entries.is_cpu or entries.dtype is not torch.float32 or library.why_not():
        best = entries.topk(count)
        return best.values, best.indices, entries.logsumexp(-1, keepdim=True)
    entries, (rows, columns) = entries.contiguous(), entries.shape
    values, lse = entries.new_empty(rows, count), entries.new_empty(rows, 1)
    indices = entries.new_empty(rows, count, dtype=torch.int64)
    work = TopEntriesStruct(
        *(0, rows, columns, count), *(tensor.data_ptr() for tensor in (entries, values, indices, lse))
    )
    run_units(library.current().top_entries, work, thread_count(entries.numel(), LEAST_WORK))
    return values, indices, lse
