"""Whether what a lens shows has room on the device: said before anything is computed."""

from __future__ import annotations

import os

import torch

from ..errors import ConfigurationError
from ..problem import Problem

SMALLER = (
    "look at a smaller rectangle, such as Weights(slice(0, 256), slice(0, 256)), at Pooled((256, 256)), or at TopK(8)"
)


def check_memory(
    asked: str, problem: Problem, sizes: tuple[int, int], *, each: int, beside: int = 0, instead: str = SMALLER
) -> None:
    """Say so where a table of `sizes` for every head takes more memory than the device has.

    Args:
        asked: what the table is, with {} where its sizes go.
        problem: it has the heads and the device.
        sizes: rows and columns.
        each: bytes of one number of the table.
        beside: bytes in all for what else is needed.
        instead: what to ask for.

    Raises:
        ConfigurationError: it does.
    """
    leading, (rows, columns) = problem.weights_shape[:-2].numel(), sizes
    needed, there = leading * rows * columns * each + beside, memory(problem.value.device)
    if there is not None and needed > there:
        raise ConfigurationError(
            f"{asked.format(f'{rows:,} × {columns:,}')} and {leading:,} heads in all needs {needed / 1e9:,.1f} GB, and "
            f"{problem.value.device} has {there / 1e9:,.1f} GB: {instead}"
        )


def memory(device: torch.device) -> int | None:
    """How many bytes a device has in all, if that can be known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None  # no POSIX system
