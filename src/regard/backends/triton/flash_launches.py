"""The launches of one problem of flash attention, forward and backward: its inputs as kernels get them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.score_forms import DotPairs
from ...normalizers import Entmax, Sigmoid
from ...normalizers.entmax import threshold_alpha
from .device_tiles import AllTiles, BitTiles, SpanTiles, device_tiles
from .dropout_hashes import dropout_argument
from .flash_backward import key_gradient, query_gradient
from .flash_forward import flash_forward
from .jit_runtime import exact_products
from .kernel_arguments import LOG2E, DropoutArgument, ScoreScale, StridedRows, with_aligned_rows, with_near_rows
from .kernel_bias import KernelBias
from .launch_settings import LaunchSettings, launch_settings, padded_dims, split_dims
from .row_terms import refine_row_terms, row_terms
from .row_thresholds import row_thresholds
from .threshold_terms import threshold_terms


class FlashLaunches:
    """Softmax attention over one batched problem; forward and backward each launch kernels, and wait for none."""

    def __init__(self, batched: BatchedProblem) -> None:
        pairs = batched.pairs
        if not isinstance(pairs, DotPairs):
            raise TypeError("code over tiles computes dot products")
        self.batched, self.problem, self.scale = batched, batched.problem, pairs.scale
        self.bias = KernelBias(batched)
        self.query, self.key, self.value = (
            with_aligned_rows(each.detach()) for each in (pairs.query, pairs.key, batched.value)
        )
        self.batch, self.heads, self.queries, self.keys = batched.shape
        self.key_heads, self.dim, self.value_dim = self.key.shape[1], self.query.shape[3], self.value.shape[3]

    def forward(self, output: Tensor, lse: Tensor, *, merge: bool) -> None:
        """Write output and log-sum-exp, or thresholds; merge: with those of other keys, which stand there."""
        setting = self._settings("forward")
        if self.score.excess is not None:
            self._find_thresholds(lse)
        old = (output.clone(), lse.clone()) if merge else (None, None)  # a repair reads them after others are written
        programs = self._row_programs(setting)
        flags = None if self.problem.mask is None else torch.zeros(programs, dtype=torch.int32, device=lse.device)
        arguments = (
            *(StridedRows.of(each) for each in (self.query, self.key, self.value, output, lse, *old)),
            *(self.score, self.tiles.of_rows(setting.rows, setting.columns), self.bias.argument, self.dropout, flags),
            *self._lengths,
        )
        for repair in (False, True)[: 1 if flags is None else 2]:
            constants = {"NEGATIVE": self.score.factor < 0, "REPAIR": repair}
            constants |= split_dims(self.dim, self.value_dim)
            self._launch(flash_forward, programs, arguments, setting, constants)

    def backward(self, saved: Saved, into: ProblemGradients) -> None:
        """Write the gradients of query, key and value; add those of bias and normalizer where `saved` asks for them."""
        gradient = self.bias.zero_gradient() if saved.needs_bias_grad else None
        by_rows = self._settings("query")
        by_columns = self._settings("key" if self.score.powers is None else "key of powers")
        programs = self._row_programs(by_rows), self.batch * self.key_heads * -(-self.keys // by_columns.columns)
        noted = torch.zeros(1 + sum(programs), dtype=torch.int32, device=self.value.device)
        any_bad, *flags = noted.split((1, *programs))
        output, above = with_near_rows(saved.output), with_aligned_rows(saved.grad_output.to(self.value.dtype))
        sums = self._empty_rows() if saved.needs_normalizer_grad else None
        terms = self._row_terms(output, above, saved, any_bad, sums)
        read = (*(StridedRows.of(each) for each in (self.query, self.key, self.value, above, output)), terms)
        lengths = *self._lengths, terms[0].numel(), self.scale / self.dropout.keep
        by_row = (
            *(*read, StridedRows.of(into.query), None if self.score.sigmoid is None else sums, self.score),
            *(self.tiles.of_rows(by_rows.rows, by_rows.columns), self.bias.with_gradient(gradient), self.dropout),
            *(flags[0], any_bad, *lengths),
        )
        by_column = (
            *(*read, StridedRows.of(into.key), StridedRows.of(into.value), self.score),
            *(self.tiles.of_columns(by_columns.rows, by_columns.columns), self.bias.argument, self.dropout),
            *(flags[1], any_bad, *lengths),
        )
        for repair in (False, True):
            constants = {"REPAIR": repair, **self.dims}
            self._launch(query_gradient, programs[0], by_row, by_rows, constants)
            self._launch(key_gradient, programs[1], by_column, by_columns, constants)
        if gradient is not None:
            self.bias.add_gradient(gradient / self.dropout.keep, into.bias)
        if sums is not None:
            of_heads = sums.sum((0, 2)) / self.dropout.keep
            for parameter in into.normalizer:
                parameter += of_heads if parameter.ndim else of_heads.sum()

    def _find_thresholds(self, thresholds: Tensor) -> None:
        """Write the threshold of each row."""
        setting = self._settings("thresholds")
        arguments = (
            *(StridedRows.of(each) for each in (self.query, self.key, thresholds)),
            *(self.score, self.tiles.of_rows(setting.rows, setting.columns), self.bias.argument, *self._lengths),
        )
        constants = {"D": self.dims["D"], "BD": self.dims["BD"]}
        self._launch(row_thresholds, self._row_programs(setting), arguments, setting, constants)

    def _threshold_terms(
        self, output: Tensor, above: Tensor, saved: Saved, terms: Tensor, any_bad: Tensor, sums: Tensor | None
    ) -> Tensor:
        """Fill in what the gradients need of each row with a threshold."""
        setting = self._settings("threshold terms")
        arguments = (
            *(StridedRows.of(each) for each in (self.query, self.key, self.value, above, output, saved.lse)),
            *(terms, sums, self.score, self.tiles.of_rows(setting.rows, setting.columns), self.bias.argument),
            *(self.dropout, any_bad, *self._lengths, terms[0].numel()),
        )
        for repair in (False, True):
            self._launch(
                threshold_terms, self._row_programs(setting), arguments, setting, {"REPAIR": repair, **self.dims}
            )
        return terms

    def _row_terms(self, output: Tensor, above: Tensor, saved: Saved, any_bad: Tensor, sums: Tensor | None) -> Tensor:
        """What the gradients need of each row: (3, B, H, M) float32. sums: for the gradient of α."""
        terms = self._empty_rows(3)
        if self.score.excess is not None:
            return self._threshold_terms(output, above, saved, terms, any_bad, sums)
        setting, plane, dims = self._settings("query"), terms[0].numel(), self.dims
        programs = self._row_programs(setting)
        results = (StridedRows.of(each) for each in (output, above, saved.lse, saved.grad_lse))
        arguments = (*results, terms, self.score, any_bad, self.queries, self.heads, plane, self.dropout.keep)
        constants: dict[str, Any] = {"DV": dims["DV"], "BDV": dims["BDV"], "BM": setting.rows}
        if programs:
            row_terms[(programs,)](*arguments, **constants, num_warps=setting.warps)  # pyright: ignore[reportCallIssue]
        if self.score.sigmoid is not None:  # there is no log-sum-exp
            return terms
        sinks = None if self.problem.sinks is None else self.problem.sinks.detach().float()
        arguments = (
            *(StridedRows.of(self.query), StridedRows.of(self.key), terms, sinks, self.score),
            *(self.tiles.of_rows(setting.rows, setting.columns), self.bias.argument, *self._lengths, plane),
        )
        # Nearly always it returns at once: nothing is loaded ahead.
        constants = {"D": dims["D"], "BD": dims["BD"]}
        self._launch(refine_row_terms, programs, arguments, replace(setting, stages=1), constants)
        return terms

    def _launch(
        self, kernel: Any, programs: int, arguments: tuple, setting: LaunchSettings, constants: dict[str, Any]
    ) -> None:
        if programs:
            tile = {"BM": setting.rows, "BN": setting.columns, "PRECISION": exact_products()}
            options = {"num_warps": setting.warps, "num_stages": setting.stages}
            kernel[(programs,)](*arguments, **constants, **tile, **options)

    def _settings(self, kernel: str) -> LaunchSettings:
        """The settings of a kernel for this problem."""
        problem = self.problem
        terms = any(each is not None for each in (problem.bias, problem.dropout, problem.softcap, problem.normalizer))
        dims = split_dims(self.dim, self.value_dim)
        dim = max(dims["BD"], dims["BDV"])
        return launch_settings(kernel, dim, self.value.dtype, self.value.device, terms=terms)

    def _empty_rows(self, *numbers: int) -> Tensor:
        """Memory for so many numbers of each row: (..., B, H, M) float32."""
        shape = *numbers, self.batch, self.heads, self.queries
        return torch.empty(shape, dtype=torch.float32, device=self.value.device)

    def _row_programs(self, setting: LaunchSettings) -> int:
        """The number of tiles of rows, over all heads."""
        return self.batch * self.heads * -(-self.queries // setting.rows)

    @property
    def _lengths(self) -> tuple[int, int, int, int]:
        return self.queries, self.keys, self.heads, self.heads // max(self.key_heads, 1)

    @cached_property
    def dims(self) -> dict[str, int]:
        """The head dims, and the powers of two from 16 on that they are padded to."""
        return padded_dims(self.dim, self.value_dim)

    @cached_property
    def score(self) -> ScoreScale:
        """Factor, softcap and the bias of a sigmoid, in units of log₂ e; and the kind of weights above a threshold."""
        scale = ScoreScale.of(self.scale, self.problem.softcap)
        alpha = threshold_alpha(self.problem.normalizer)
        if alpha is not None:
            scale = scale._replace(excess=(alpha - 1.0) / LOG2E, squared=1 if alpha == 1.5 else None)
        elif isinstance(self.problem.normalizer, Entmax):
            powers = self.problem.normalizer.inverse_powers(self.heads, self.value.device).contiguous()
            scale = scale._replace(excess=1.0, powers=powers)
        return scale._replace(sigmoid=self._sigmoid_bias())

    def _sigmoid_bias(self) -> Tensor | None:
        """b of each head, in units of log₂ e; None of softmax attention."""
        normalizer = self.problem.normalizer
        if not isinstance(normalizer, Sigmoid):
            return None
        return (normalizer.bias_of_heads(self.heads, self.value.device) * LOG2E).contiguous()

    @cached_property
    def tiles(self) -> AllTiles | SpanTiles | BitTiles:
        """The tiles of the mask."""
        return device_tiles(self.batched)

    @cached_property
    def dropout(self) -> DropoutArgument:
        """The hashes of rows and columns."""
        return dropout_argument(self.batched)
