"""Large arrays on the CPU whose memory the system gives as they are written to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def zeros_as_written(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written to, and then page by page.

    torch would write each zero, and so take all of the memory, which takes longer than what is put into it. Pages are
    the system's small ones: huge ones are faster where there are some free, but are taken whole, and where the system
    has to move others out of the way for them they take several times as long.

    >>> zeros_as_written((2, 3), torch.float32)
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
    return torch.frombuffer(memory, dtype=dtype).view(tuple(sizes))
