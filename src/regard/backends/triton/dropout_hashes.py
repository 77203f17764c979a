"""The hashes of dropout, of all rows and all columns, by one launch: what `core.dropout.Dropout.hashes` computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...core.batched_problem import BatchedProblem
from ...core.dropout import Dropout
from . import score_tile
from .kernel_arguments import DropoutArgument

HASHES = 256
"""Hashes of a program."""


@triton.jit
def _dropout_hashes(
    SEED,
    ROWS,
    COLUMNS,
    HEADS,
    first_head,
    first_query,
    first_key,
    step,
    M,
    N,
    SIZE: tl.constexpr,
):
    """Rows (heads, M) and columns (N,): the programs of the last head compute the columns.

    HEADS: None, or (head count, number, first, all) of `Dropout`, each None or a number.
    """
    at, head = tl.program_id(0) * SIZE + tl.arange(0, SIZE), tl.program_id(1).to(tl.int64)
    seed = tl.load(SEED)
    if head < tl.num_programs(1) - 1:
        number = head + first_head
        if HEADS[0] is not None:
            number = number % HEADS[0]
        if HEADS[1] is not None:
            number = number // HEADS[1] * HEADS[3] + HEADS[2] + number % HEADS[1]
        queries = first_query + at.to(tl.int64) * step
        row = score_tile.hash64(score_tile.hash64(seed + number) + queries)
        tl.store(ROWS + head * M + at, row.to(tl.int32), mask=at < M)
    else:
        keys = first_key + at.to(tl.int64) * step
        tl.store(COLUMNS + at, score_tile.hash64(seed - 1 - keys).to(tl.int32), mask=at < N)


def dropout_argument(batched: BatchedProblem) -> DropoutArgument:
    """The hashes of a problem; by torch's operators where positions are tensors."""
    dropout, problem = batched.problem.dropout, batched.problem
    if dropout is None:
        return DropoutArgument()
    limits = dropout.threshold, 1.0 - dropout.probability
    if problem.shift is None:
        rows, columns = dropout.hashes(*problem.dropout_indices(batched.grid, batched.batch))
        batches = columns.numel() // max(problem.keys, 1)
        return DropoutArgument(rows.contiguous(), columns.contiguous(), problem.keys if batches > 1 else 0, *limits)
    batch, heads, queries, keys = batched.shape
    rows = torch.empty(batch, heads, queries, dtype=torch.int32, device=batched.value.device)
    columns = torch.empty(keys, dtype=torch.int32, device=batched.value.device)
    key_positions = problem.key_positions if isinstance(problem.key_positions, range) else range(keys)
    first_query = key_positions.start + (keys - queries - (problem.shift or 0)) * problem.step
    grid = triton.cdiv(max(queries, keys), HASHES), batch * heads + 1
    first_head = batched.batch.indices(problem.batch.numel())[0] * heads
    if grid[0]:
        _dropout_hashes[grid](
            *(dropout.seed, rows, columns, _heads(dropout), first_head, first_query, key_positions.start),
            *(problem.step, queries, keys),
            SIZE=HASHES,  # pyright: ignore[reportArgumentType]
        )
    return DropoutArgument(rows, columns, 0, *limits)


def _heads(dropout: Dropout) -> tuple[int | None, ...]:
    return dropout.head_count, *(dropout.head_block or (None, None, None))
