"""The group `gathered` of the backend in Triton: attention to listed keys, read where they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, Saved
from ...core.finite import CheckedRows
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...masks.chosen import without_duplicates
from ...tiles.key_lists import KeyLists, ListGradients, ListTerms
from ...tiles.memo import memoize
from .jit_runtime import exact_products, launch
from .kernel_arguments import BiasArgument, ListsArgument, ScoreScale, StridedRows, with_aligned_rows, with_near_rows
from .launch_settings import LaunchSettings, padded_dims, settings_of_lists

MAX_DIM = 256
"""The largest head dim."""


class GatheredInTriton:
    """A program reads the keys of a list once for up to 64 rows that share it; no list is written out as numbers.

    As `FlashInTriton`, it waits for nothing, and results and gradients need no check. Gradients of keys and values are
    added up with atomic operations: they are rounded differently from call to call.
    """

    in_tiles = True

    def why_not(self, problem: Problem) -> list[str]:
        """Large head dims."""
        dims = problem.pairs.query.shape[-1], problem.value.shape[-1]
        if max(dims) > MAX_DIM or min(dims) < 1:
            return [f"its code in Triton takes head dims from 1 to {MAX_DIM}; these are {dims[0]} and {dims[1]}"]
        return []

    def forward(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> CheckedRows:
        """Output (B, H, M, Dv), in the dtype of the values, and log-sum-exp (B, H, M)."""
        output, lse = batched.empty_results()
        with torch.cuda.device_of(batched.value):
            _ListLaunches(batched, lists, terms).forward(output, lse)
        return CheckedRows((output, lse))

    def backward(
        self, batched: BatchedProblem, saved: Saved, lists: KeyLists, terms: ListTerms, *, of_added: bool
    ) -> ListGradients:
        """The gradients, float32 of keys and values; that of what is added if it is asked for."""
        with torch.cuda.device_of(batched.value):
            return _ListLaunches(batched, lists, terms).backward(saved, of_added=of_added)


class _ListLaunches:
    """The launches of one problem, forward and backward: its inputs as kernels get them."""

    def __init__(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> None:
        pairs = batched.pairs
        if not isinstance(pairs, DotPairs):
            raise TypeError("code over lists computes dot products")
        self.batched, self.scale = batched, pairs.scale
        self.score = ScoreScale.of(pairs.scale, batched.problem.softcap)
        self.query, self.key, self.value = (
            with_aligned_rows(each.detach()) for each in (pairs.query, pairs.key, batched.value)
        )
        self.batch, self.heads, self.queries, self.keys = batched.shape
        self.key_heads = self.key.shape[1]
        self.lists = self._lists_argument(lists)
        self.terms = [self._rows_of_term(term) for term in terms]
        self.dims = padded_dims(pairs.query.shape[3], batched.value.shape[3])
        self.rows = self.heads // max(self.lists.heads, 1) * lists.rows

    def forward(self, output: Tensor, lse: Tensor) -> None:
        """Write output and log-sum-exp."""
        from .gathered_forward import gathered_forward  # imports Triton, which a process without CUDA need not load

        setting = self._setting("forward")
        programs = self._programs(setting)
        unequal = self.lists.spans is not None or self.terms[0].pointer is not None
        flags = torch.zeros(programs, dtype=torch.int32, device=lse.device) if unequal else None
        arguments = (
            *(StridedRows.of(each) for each in (self.query, self.key, self.value, output, lse)),
            *(self.lists, *self.terms, self.score, BiasArgument(), flags, *self._lengths),
        )
        for repair in (False, True)[: 1 if flags is None else 2]:
            self._launch(gathered_forward, arguments, setting, {"REPAIR": repair, **self.dims})

    def backward(self, saved: Saved, *, of_added: bool) -> ListGradients:
        """The gradients."""
        from .gathered_backward import gathered_backward

        new, shape = self.value.new_empty, (self.batch, self.heads, self.queries)
        query = new(*shape, self.dims["D"], dtype=self.query.dtype)
        key, value = (
            torch.zeros(self.batch, self.key_heads, self.keys, dim, dtype=torch.float32, device=self.value.device)
            for dim in (self.dims["D"], self.dims["DV"])
        )
        added = new(*shape, self.lists.length, dtype=torch.float32) if of_added else None
        output, above = with_near_rows(saved.output), with_aligned_rows(saved.grad_output.to(self.value.dtype))
        any_bad = self._any_not_finite(output)
        terms = self._row_terms(output, above, saved, any_bad)
        results = (
            *(terms, StridedRows.of(query), key, value, StridedRows.of(added)),
            *(self.lists, *self.terms, self.score, BiasArgument(), any_bad),
        )
        read = (StridedRows.of(each) for each in (self.query, self.key, self.value, above, output))
        arguments = (*read, *results, *self._lengths, terms[0].numel(), self.scale)
        for repair in (False, True):
            self._launch(gathered_backward, arguments, self._setting("backward"), {"REPAIR": repair, **self.dims})
        return ListGradients(query, key, value, added)

    def _row_terms(self, output: Tensor, above: Tensor, saved: Saved, any_bad: Tensor) -> Tensor:
        """What the gradients need of each row: (3, B, H, M) float32, as `row_terms` of the flash kernels."""
        from .gathered_backward import refine_listed_terms
        from .row_terms import row_terms

        terms = torch.empty(3, self.batch, self.heads, self.queries, dtype=torch.float32, device=self.value.device)
        setting, plane = self._setting("backward"), terms[0].numel()
        results = (StridedRows.of(each) for each in (output, above, saved.lse, saved.grad_lse))
        constants: dict[str, Any] = {"DV": self.dims["DV"], "BDV": self.dims["BDV"], "BM": 64, "num_warps": 8}
        if plane:
            programs = self.batch * self.heads * -(-self.queries // 64)
            launch(
                row_terms,
                (programs,),
                *(*results, terms, self.score, any_bad, self.queries, self.heads, plane, 1.0),
                **constants,
            )
        sinks = self.batched.problem.sinks
        arguments = (
            *(StridedRows.of(self.query), StridedRows.of(self.key), terms),
            *(None if sinks is None else sinks.detach().float(), self.lists, self.terms[0], self.score, BiasArgument()),
            *(*self._lengths, plane),
        )
        # Nearly always it returns at once: nothing is loaded ahead.
        self._launch(refine_listed_terms, arguments, replace(setting, stages=1), {k: self.dims[k] for k in ("D", "BD")})
        return terms

    def _any_not_finite(self, output: Tensor) -> Tensor:
        """1 where a number of the inputs or the output is not finite, else 0: (1,) int32, read by no host."""
        tensors = self.query, self.key, self.value, output
        finite = torch.stack([each.isfinite().all() for each in tensors]).all()
        return finite.logical_not().to(torch.int32).view(1)

    def _launch(self, kernel: Any, arguments: tuple, setting: LaunchSettings, constants: dict[str, Any]) -> None:
        if (programs := self._programs(setting)) > 0:
            tile = {"BR": setting.rows, "BN": setting.columns, "PRECISION": exact_products()}
            options = {"num_warps": setting.warps, "num_stages": setting.stages}
            launch(kernel, (programs,), *arguments, **constants, **tile, **options)

    def _setting(self, kernel: str) -> LaunchSettings:
        dim = max(self.dims["BD"], self.dims["BDV"])
        return settings_of_lists(kernel, self.rows, dim, self.value.dtype)

    def _programs(self, setting: LaunchSettings) -> int:
        """Some for each list of each head that has lists, over all batches."""
        if not (self.heads and self.queries):
            return 0
        return self.batch * self.lists.heads * self.lists.lists * -(-self.rows // setting.rows)

    @property
    def _lengths(self) -> tuple[int, int, int, int]:
        return self.queries, self.keys, self.heads, self.key_heads

    def _lists_argument(self, lists: KeyLists) -> ListsArgument:
        """The lists without duplicates, which are looked for once for a mask."""

        def distinct() -> Tensor:
            return without_duplicates(lists.indices, lists.largest).contiguous()

        indices = memoize(self.batched.problem, ("distinct lists", lists.indices.device), distinct)
        (batch, head), own = _shared_strides(indices), indices.shape[1]
        return ListsArgument(
            *(indices, batch, head, self.heads if own == self.heads else self.key_heads, indices.shape[2], lists.rows),
            *(lists.length, lists.columns, lists.first),
            *((None, 0) if lists.spans is None else (lists.spans, _shared_strides(lists.spans)[0])),
        )

    def _rows_of_term(self, term: Tensor | None) -> StridedRows:
        """A term (B or 1, H or 1, M, length) as rows of all batches and heads."""
        if term is None:
            return StridedRows(None)
        return StridedRows.of(with_near_rows(term).expand(self.batch, self.heads, -1, -1))


def _shared_strides(tensor: Tensor) -> tuple[int, int]:
    """The strides of the first two axes; 0 of one that all share."""
    batch, head = (
        0 if size == 1 else stride for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    )
    return batch, head
