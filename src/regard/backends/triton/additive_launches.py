"""The launches of one problem of additive attention, forward and backward: its inputs as kernels get them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.score_forms import AdditivePairs
from .additive_backward import additive_key_gradient, additive_query_gradient
from .additive_forward import additive_forward
from .additive_scores import STRIP, FeatureWeights, PreparedTokens, prepare_tokens
from .device_tiles import device_tiles
from .dropout_hashes import dropout_argument
from .jit_runtime import INTERPRETED, exact_products, launch
from .kernel_arguments import ScoreScale, StridedRows, with_aligned_rows, with_near_rows
from .kernel_bias import LOG2E, KernelBias
from .launch_settings import architecture

FEATURES = 8
"""Features are padded to a multiple of so many."""


def _tiles(length: int, size: int) -> int:
    """The number of tiles of a size."""
    return -(-length // size)


def _features_at_once(tokens: int, warps: int) -> int:
    """The features whose gradients are summed up at once: a thread has one of a token, to which no other adds."""
    return min(32 * warps // tokens, FEATURES)


@dataclass(eq=False)
class AdditiveLaunches:
    """Additive attention over one batched problem; forward and backward each launch kernels, and wait for none."""

    batched: BatchedProblem

    def __post_init__(self) -> None:
        pairs = self.batched.pairs
        if not isinstance(pairs, AdditivePairs):
            raise TypeError("code for additive scores computes those of additive pairs")
        self.query, self.key = with_near_rows(pairs.query.detach()), with_near_rows(pairs.key.detach())
        self.value = with_aligned_rows(self.batched.value.detach())
        self.batch, self.heads, self.queries, self.keys = self.batched.shape
        self.key_heads, self.features, self.dim = self.key.shape[1], self.query.shape[3], self.value.shape[3]
        weight = pairs.weight.detach().float().reshape(-1, self.features).contiguous()
        padded = _tiles(self.features, FEATURES) * FEATURES
        self.weight = FeatureWeights(weight, self.features if len(weight) > 1 else 0, self.features, padded)
        cap = self.batched.problem.softcap
        self.score = ScoreScale(LOG2E, None) if cap is None else ScoreScale(1.0 / cap, cap * LOG2E)
        self.tiles, self.bias = device_tiles(self.batched), KernelBias(self.batched)
        self.dropout = dropout_argument(self.batched)

    def forward(self, output: Tensor, lse: Tensor) -> None:
        """Write output and log-sum-exp."""
        rows, columns, warps = self._tile()
        programs = _tiles(self.queries, rows) * self.batch * self.heads
        if not programs:
            return
        queries, keys = self._prepare()
        launch(
            additive_forward,
            (programs,),
            *(queries, keys, self.weight, *map(StridedRows.of, (self.value, output, lse))),
            *(self.score, self.tiles.of_rows(rows, columns), self.bias.argument, self.dropout),
            *(self.queries, self.keys, self.heads, self.heads // self.key_heads),
            **self._constants(rows, columns),
            num_warps=warps,
        )

    def backward(self, saved: Saved, into: ProblemGradients) -> None:
        """Add the gradients of query, key, weight and value, all 0 before, and of a bias where `saved` asks for it."""
        rows, columns, warps = self._tile()
        group = self.heads // max(self.key_heads, 1)
        row_programs = _tiles(self.queries, rows) * self.batch * self.heads
        column_programs = _tiles(self.keys, columns) * self.batch * self.key_heads
        if not row_programs or not column_programs:
            return
        bias_gradient = self.bias.zero_gradient() if saved.needs_bias_grad else None
        queries, keys = self._prepare()
        shape = self.batch, self.heads, self.queries
        terms = self.value.new_empty(3, *shape, dtype=torch.float32)
        tanh_sums = self.value.new_zeros(*shape, self.features, dtype=torch.float32)
        upstream = with_aligned_rows(saved.grad_output.to(self.value.dtype)), with_aligned_rows(saved.output)
        read = queries, keys, self.weight, *map(StridedRows.of, (self.value, *upstream))
        sinks = self.batched.problem.sinks
        sinks = None if sinks is None else sinks.detach().float()
        sizes = self.queries, self.keys, self.heads, group, terms[0].numel()
        constants = {**self._constants(rows, columns), "VALUES": self._values_at_once(), "num_warps": warps}
        launch(
            additive_query_gradient,
            (row_programs,),
            *(*read, StridedRows.of(saved.lse), StridedRows.of(saved.grad_lse), sinks, terms),
            *(StridedRows.of(into.query), tanh_sums, self.score, self.tiles.of_rows(rows, columns)),
            *(self.bias.with_gradient(bias_gradient), self.dropout, *sizes),
            **constants,
            FEATURES=_features_at_once(rows, warps),
        )
        launch(
            additive_key_gradient,
            (column_programs,),
            *(*read, terms, StridedRows.of(into.key), StridedRows.of(into.value), self.score),
            *(self.tiles.of_columns(rows, columns), self.bias.argument, self.dropout, *sizes),
            **constants,
            FEATURES=_features_at_once(columns, warps),
        )
        if into.weight is not None:
            into.weight.add_(tanh_sums.sum((0, 2)).sum_to_size(self.weight.pointer.shape).view_as(into.weight))
        if bias_gradient is not None:
            self.bias.add_gradient(bias_gradient / self.dropout.keep, into.bias)

    def _prepare(self) -> tuple[PreparedTokens, PreparedTokens]:
        """The exponentials of all tokens."""
        prepared, programs = [], []
        for tokens in (self.query, self.key):
            heads, strips = tokens.shape[0] * tokens.shape[1], _tiles(tokens.shape[2], STRIP.value)
            length = strips * STRIP.value
            numbers = tokens.new_empty(heads, 2, self.weight.padded, length, dtype=torch.float32)
            bounds = tokens.new_empty(heads, strips, dtype=torch.float32)
            prepared.append(PreparedTokens(numbers, bounds, length))
            programs.append(heads * strips)
        launch(
            prepare_tokens,
            (sum(programs),),
            *(StridedRows.of(self.query), StridedRows.of(self.key), *prepared, self.weight),
            *(self.queries, self.keys, self.heads, self.key_heads, programs[0]),
            A=self.features,
            AP=self.weight.padded,
            AT_ONCE=16,
        )
        return prepared[0], prepared[1]

    def _tile(self) -> tuple[int, int, int]:
        """Rows and columns of a tile, and warps: as many rows as leave no thread without registers.

        They are fewer without tensor cores, with those of compute capability 8, which read registers, and for wide
        values.
        """
        if INTERPRETED:
            return 64, 64, 8
        value = self.value
        halved = (value.dtype == torch.float32) + (architecture(value.device) == 80) + (self.dim > 128)
        return max(64 >> halved, 16), 32, 8

    def _values_at_once(self) -> int:
        """Numbers of a value that are multiplied at once: float32 fills too many registers with more."""
        padded = self._constants(0, 0)["BDV"]
        return min(padded, 16 if self.value.dtype == torch.float32 else 64)

    def _constants(self, rows: int, columns: int) -> dict[str, Any]:
        padded = max(1 << (self.dim - 1).bit_length(), 16)
        sizes = {"DV": self.dim, "BDV": padded, "BM": rows, "BN": columns}
        return {**sizes, "PRECISION": exact_products()}
