"""New memory for results, asked of the system in large pages where it hands them out to those who ask.

A page that is written to for the first time interrupts the program, and the system clears it: in pages of 4 KiB that
takes a tenth to a fifth of what attention with a window takes in all.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

LARGE_PAGE = 2**21
LEAST = 4 * LARGE_PAGE
"""Bytes from which on the asking is worth its call."""

_HUGEPAGE = 14  # MADV_HUGEPAGE of Linux's <sys/mman.h>


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the CPU whose numbers are whatever was there."""
    tensor = torch.empty(*sizes, dtype=dtype)
    if tensor.nbytes >= LEAST and (advise := _advise()) is not None:
        first = -(-tensor.data_ptr() // LARGE_PAGE) * LARGE_PAGE
        length = (tensor.data_ptr() + tensor.nbytes - first) // LARGE_PAGE * LARGE_PAGE
        advise(first, length, _HUGEPAGE)  # a refusal changes nothing
    return tensor


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's madvise, where it is Linux."""
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
