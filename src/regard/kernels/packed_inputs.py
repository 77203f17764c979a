"""Problems whose keys and values are codes: the kernel `decode` reads them as they are, any other as numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .. import native
from ..backends.cpu.code_writing import write_codes
from ..core.packed_rows import CodeRows, PackedTensor
from ..core.problem import Problem
from ..core.torch_modes import under_transform


def codes_are_read(problem: Problem) -> bool:
    """Whether native code reads the codes of keys and values: on the CPU, where no gradient is wanted."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return (
        type(key) is type(value) is PackedTensor
        and query.is_cpu
        and query.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and query.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0] > 0
        and key.shape[1] > 0
        and native.why_not() is None
        and not under_transform()
        and not problem.requires_grad()
    )


def store(codes: CodeRows, first: int, rows: Tensor) -> None:
    """Store rows (B, H, T, D) as codes from a token on, by native code where it is there, with the same result."""
    if rows.is_cpu and rows.shape[:3].numel() and native.why_not() is None and not under_transform():
        write_codes(codes, first, rows)
    else:
        codes.write(first, rows)


def widened(problem: Problem) -> Problem:
    """The problem with the numbers that its codes stand for; the problem itself without codes."""
    if not problem.has_codes():
        return problem
    pairs = replace(problem.pairs, key=_numbers(problem.pairs.key))
    return replace(problem, pairs=pairs, value=_numbers(problem.value))


def _numbers(rows: Tensor) -> Tensor:
    return rows.widened if isinstance(rows, PackedTensor) else rows
