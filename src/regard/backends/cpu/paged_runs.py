"""A few tokens of each of many sequences over their keys in pages, in C, each key read where it is.

`PagedInC` calls `regard_paged` of paged.c; the structures are explained in paged.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from ..base import TokenRuns
from . import library
from .few_queries import LEAST_WORK, MOST_ROWS
from .library import DTYPES
from .threads import run_units, thread_count

LEAST_KEYS = 512
"""Runs are not cut into parts of fewer keys."""
UNITS = 8
"""Runs of all heads that each thread is to have, so that all threads end at about one time."""


class PagedStruct(ctypes.Structure):
    """The structure `paged` of paged.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "heads", "group_heads", "tokens")),
        *((name, c_int64) for name in ("dim", "value_dim", "dtype", "query_dtype", "part_rows")),
        *(("scale", c_float), ("query", c_void_p)),
        *(("key", c_void_p), ("key_head", c_int64), ("key_row", c_int64)),
        *(("value", c_void_p), ("value_head", c_int64), ("value_row", c_int64)),
        *((name, c_void_p) for name in ("runs", "left", "part", "part_lse", "output", "lse")),
    )


class PagedRunStruct(ctypes.Structure):
    """The structure `paged_run` of paged.h."""

    _fields_ = tuple(
        (name, c_int64) for name in ("token", "tokens", "key", "keys", "limit", "row", "group", "first_run", "runs")
    )


class PagedInC:
    """Runs of keys are shared out among threads; of cut ones the last thread merges the parts."""

    most_rows = MOST_ROWS

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, groups: Sequence[TokenRuns]
    ) -> tuple[Tensor, Tensor]:
        """Output (H, T, Dv) and log-sum-exp (H, T), float32: 0 and -inf of tokens in no group, or without keys."""
        (heads, tokens, dim), (key_heads, _, value_dim) = query.shape, value.shape
        group = heads // key_heads
        if query.dtype not in DTYPES:
            query = query.float()
        query = query.view(key_heads, group, tokens, dim).transpose(1, 2).contiguous()
        count = thread_count(sum(each.keys for each in groups) * key_heads * (dim + value_dim), LEAST_WORK)
        runs, rows = _runs(tuple(groups), group, key_heads, count)
        output = torch.zeros(key_heads, tokens, group, value_dim, device="cpu")
        lse = torch.full((key_heads, tokens, group), float("-inf"), device="cpu")
        part = torch.empty(key_heads, rows, value_dim, device="cpu")
        part_lse = torch.empty(key_heads, rows, device="cpu")
        left = _left(runs, key_heads)
        work = PagedStruct(
            *(0, len(runs) * key_heads, 0, key_heads, group, tokens, dim, value_dim),
            *(DTYPES.index(value.dtype), DTYPES.index(query.dtype), rows, scale, query.data_ptr()),
            *(key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2]),
            *(tensor.data_ptr() for tensor in (runs, left, part, part_lse, output, lse)),
        )
        run_units(library.current().paged, work, count)
        return output.transpose(1, 2).reshape(heads, tokens, value_dim), lse.transpose(1, 2).reshape(heads, tokens)


def _left(runs: Tensor, key_heads: int) -> Tensor:
    """How many runs of each group are not computed yet, for each head: (groups, heads)."""
    firsts = runs[runs[:, 7] == torch.arange(len(runs), device="cpu")]
    return firsts[:, 8:].repeat(1, key_heads)


@lru_cache(maxsize=16)
def _runs(groups: tuple[TokenRuns, ...], group_heads: int, key_heads: int, threads: int) -> tuple[Tensor, int]:
    """The runs of all groups as numbers of `paged_run`, long ones cut, and the rows of all parts of a head.

    The layers of a step have the same ones.
    """
    total = sum(each.keys for each in groups) * key_heads
    longest = max(-(-total // (threads * UNITS)) if threads > 1 else total, LEAST_KEYS, 1)
    table: list[tuple[int, ...]] = []
    row = 0
    for number, each in enumerate(groups):
        pieces = [
            (first + begin, min(longest, count - begin))
            for first, count in each.runs
            for begin in range(0, count, longest)
        ]
        limit, begin = each.limit, len(table)
        for first, count in pieces:
            table.append((each.token, each.tokens, first, count, limit, row, number, begin, len(pieces)))
            limit -= count
            row += each.tokens * group_heads * (len(pieces) > 1)
    return torch.tensor(table, dtype=torch.int64, device="cpu").reshape(len(table), 9), row
