"""Large arrays on the CPU whose memory the system gives as they are written to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def zeros_as_written(sizes: Sequence[int], dtype: torch.dtype, *, huge: bool) -> Tensor:
    """Zeros that take no memory until they are written to, and then page by page.

    torch would write each zero, and meet its memory in pages of 4 KiB, which takes four times as long as the writing
    itself. huge: in pages of 2 MiB where the system has such, which are taken whole: for what is mostly written.

    >>> zeros_as_written((2, 3), torch.float32, huge=True)
    tensor([[0., 0., 0.],
            [0., 0., 0.]])
    """
    count = math.prod(sizes)
    if not count:
        return torch.zeros(tuple(sizes), dtype=dtype, device="cpu")
    private: dict[str, Any] = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # else no POSIX system, where it is private as it is
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    memory = mmap.mmap(-1, count * dtype.itemsize, **private)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))
