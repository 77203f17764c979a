"""The linear recurrence in chunks of tokens: a `RecurrenceProblem` as launches of kernels in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import language

from ...core.recurrence_problem import RecurrenceGradients, RecurrenceProblem, RecurrenceResult
from . import jit_runtime
from .chunked_recurrence import chunk_inverses, chunk_outputs, chunk_states
from .recurrence_gradient import (
    chunk_writes,
    key_and_gate_gradients,
    query_gradients,
    state_gradients,
    value_gradients,
    weight_gradients,
)
from .recurrence_step import prepare_step

LONG_CHUNK, SHORT_CHUNK = 64, 32
"""Tokens of a chunk, powers of 2: short ones where registers would hold no more."""
FEATURE_MAPS = ("identity", "elu")
"""Those that the kernels have."""
MOST_FEATURES = 256
"""Features with the delta rule, whose kernels have all of them in one block."""


class RecurrencesInTriton:
    """The linear recurrence in chunks of tokens, and one token of it."""

    prepare_step = staticmethod(prepare_step)

    def why_not(self, problem: RecurrenceProblem) -> list[str]:
        """Sums that are not float32 on the device, and what kernels have no code for."""
        reasons = []
        for name in ("decay", "beta", "state", "total"):
            tensor = getattr(problem, name)
            if tensor is not None and (tensor.dtype is not torch.float32 or tensor.device != problem.query.device):
                kind = f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
                reasons.append(
                    f"its code in Triton reads the {name} as float32 on {problem.query.device}; this is {kind}"
                )
        if problem.feature_map not in FEATURE_MAPS:
            reasons.append(f"its code in Triton has the feature maps {FEATURE_MAPS}; this is {problem.feature_map!r}")
        if not problem.key.shape[-1] or not problem.value.shape[-1]:
            reasons.append("its code in Triton needs at least one feature and one value")
        if problem.beta is not None and problem.normalize:
            reasons.append("its code in Triton has no total of weights for the delta rule")
        if problem.removal is not None:
            reasons.append("its code in Triton removes the value of the written key, and this problem has another key")
        if problem.beta is not None and problem.key.shape[-1] > MOST_FEATURES:
            reasons.append(
                f"its code in Triton has the delta rule for up to {MOST_FEATURES} features; these are "
                f"{problem.key.shape[-1]}"
            )
        return reasons

    def prepare_pass(self, problem: RecurrenceProblem, scale: float) -> None:
        """None: a launch reads the shapes of its tensors anew."""
        return

    def segments(self, problem: RecurrenceProblem) -> int:
        """The number of states that `forward` stores for `backward`, of each key head: one for each chunk."""
        return -(-problem.key.shape[2] // chunk_of(problem))

    def forward(self, problem: RecurrenceProblem, *, stores_borders: bool = False) -> RecurrenceResult:
        """The outputs and the final state; stores_borders: with the states before each chunk."""
        launches = RecurrenceLaunches(problem)
        states = launches.states()
        output, row_total = launches.outputs(states)
        borders = (states.before, states.totals_before) if stores_borders else (None, None)
        return RecurrenceResult(output, row_total, states.after, states.total_after, *borders)

    def backward(
        self,
        problem: RecurrenceProblem,
        border_state: Tensor,
        grad_output: Tensor,
        grad_state: Tensor | None = None,
        *,
        grad_total: Tensor | None = None,
        output: Tensor | None = None,
        row_total: Tensor | None = None,
        border_total: Tensor | None = None,
    ) -> RecurrenceGradients:
        """The gradients of all inputs, from those of the output and of the final state and total; None for 0.

        border_state: of `forward` with `stores_borders`; where outputs are divided by their totals, so are output,
        row_total and border_total, which are needed there.
        """
        launches = RecurrenceLaunches(problem)
        launches.arguments |= {
            "STATES": border_state.contiguous(),
            "TOTALS": _contiguous(border_total),
            "ROW_TOTAL": row_total,
            "GRAD_OUTPUT": _strided(grad_output),
            "GRAD_FINAL": _contiguous(grad_state),
            "GRAD_FINAL_TOTAL": _contiguous(grad_total) if problem.normalize else None,
        }
        return launches.gradients(output)


@dataclass(frozen=True, eq=False)
class ChunkStates:
    """States before each chunk, (B, Hk, chunks, D, Dv), and after the last, (B, Hk, D, Dv); totals, or None.

    written: u of each token, (B, Hk, N, Dv).
    """

    before: Tensor
    totals_before: Tensor | None
    after: Tensor
    total_after: Tensor | None
    written: Tensor


class Tile(NamedTuple):
    """The most features and values of a block, and the warps and stages of the program that computes it."""

    features: int
    values: int
    warps: int
    stages: int


NARROW_TILES = {
    chunk_inverses: Tile(32, 16, 8, 1),
    chunk_states: Tile(64, 32, 4, 2),
    chunk_outputs: Tile(64, 64, 4, 2),
    chunk_writes: Tile(64, 16, 4, 1),
    weight_gradients: Tile(16, 64, 4, 2),
    value_gradients: Tile(32, 64, 4, 2),
    state_gradients: Tile(64, 32, 4, 2),
    query_gradients: Tile(64, 64, 4, 2),
    key_and_gate_gradients: Tile(32, 64, 4, 2),
}
"""Of each kernel, where factors of products are bfloat16."""
WIDE_TILES = {
    chunk_inverses: Tile(32, 16, 4, 1),
    chunk_states: Tile(64, 16, 4, 1),
    chunk_outputs: Tile(32, 32, 4, 1),
    chunk_writes: Tile(64, 16, 4, 1),
    weight_gradients: Tile(16, 32, 4, 1),
    value_gradients: Tile(32, 32, 4, 1),
    state_gradients: Tile(64, 16, 4, 1),
    query_gradients: Tile(32, 32, 4, 1),
    key_and_gate_gradients: Tile(16, 32, 4, 1),
}
"""The same where they are float32."""
ALL_FEATURES = (chunk_states, chunk_writes, state_gradients)
"""The kernels that have all features in one block with the delta rule."""


def chunk_of(problem: RecurrenceProblem) -> int:
    """The tokens of a chunk: factors of float32, and decays of each feature, take more registers a token."""
    per_feature = problem.decay is not None and problem.decay.ndim == 4
    return LONG_CHUNK if problem.query.dtype == torch.bfloat16 and not per_feature else SHORT_CHUNK


def tile_of(kernel: Any, problem: RecurrenceProblem) -> Tile:
    """The tile of a kernel, whose blocks are no larger than the dims of the problem."""
    narrow = problem.query.dtype == torch.bfloat16
    features, values, warps, stages = (NARROW_TILES if narrow else WIDE_TILES)[kernel]
    dim, value_dim = _block(problem.key.shape[3]), _block(problem.value.shape[3])
    if problem.decay is not None and problem.decay.ndim == 4:  # their factors take registers, too
        features = max(16, features // 2)
    if problem.beta is not None and kernel in ALL_FEATURES:
        features, values, warps = dim, min(values, 16), 4 if dim <= 64 else 8
    return Tile(min(features, dim), min(values, value_dim), warps, stages)


class RecurrenceLaunches:
    """The launches of one problem. Kernels take their arguments by name, of those that all have and of their own."""

    def __init__(self, problem: RecurrenceProblem) -> None:
        query, key, value = problem.query, problem.key, problem.value
        self.heads, self.dim, self.value_dim = query.shape[1], key.shape[3], value.shape[3]
        self.batch, self.key_heads, self.count = key.shape[:3]
        self.chunk, self.problem = chunk_of(problem), problem
        self.chunks = -(-self.count // self.chunk)
        narrow = query.dtype == torch.bfloat16  # sums may overflow float16
        self.factor_dtype = torch.bfloat16 if narrow else torch.float32
        """What factors of products are rounded to."""
        self.arguments: dict[str, Any] = {
            "Q": _strided(query),
            "K": _strided(key),
            "V": _strided(value),
            "DECAY": _strided(problem.decay),
            "BETA": _strided(problem.beta),
            "STATE": _contiguous(problem.state),
            "TOTAL": _contiguous(problem.total) if problem.normalize else None,
            "key_heads": self.key_heads,
            "group": self.heads // max(self.key_heads, 1),
            "rows": self.batch * self.key_heads,
            "count": self.count,
            "chunks": self.chunks,
            "D": self.dim,
            "DV": self.value_dim,
            "PER_FEATURE": problem.decay is not None and problem.decay.ndim == 4,
            "ELU": problem.feature_map == "elu",
            "T": language.bfloat16 if narrow else language.float32,
            "PRECISION": "tf32" if query.dtype == torch.float16 else jit_runtime.float32_products(),
            "C": self.chunk,
            "LEVELS": self.chunk.bit_length() - 1,
        }

    def new(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory (B, ...) for results."""
        return self.problem.query.new_empty(self.batch, *sizes, dtype=dtype)

    def launch(self, kernel: Any, programs: int, blocks: int = 1, **own: Any) -> None:
        """Launch a kernel with the arguments that it names."""
        tile = tile_of(kernel, self.problem)
        known = {**self.arguments, "BD": tile.features, "BV": tile.values, **own}
        given = {name: known[name] for name in kernel.arg_names}
        with torch.cuda.device_of(self.problem.query):
            kernel[programs, blocks](**given, num_warps=tile.warps, num_stages=tile.stages)

    def by_values(self, kernel: Any, **own: Any) -> None:
        """Launch a kernel whose programs have a chunk of a key head and a block of values each."""
        blocks = -(-self.value_dim // tile_of(kernel, self.problem).values)
        self.launch(kernel, self.batch * self.key_heads * self.chunks, blocks, **own)

    def over_chunks(self, kernel: Any, **own: Any) -> None:
        """Launch a kernel whose programs go over all chunks of a key head, with a block of its state each."""
        features, values = tile_of(kernel, self.problem)[:2]
        blocks = -(-self.dim // features) * -(-self.value_dim // values)
        self.launch(kernel, self.batch * self.key_heads, blocks, **own)

    def inverses(self) -> Tensor | None:
        """The inverses of the systems of the delta rule, (B, Hk, chunks, C, C); None without it."""
        if self.problem.beta is None:
            return None
        inverse = self.new(self.key_heads, self.chunks, self.chunk, self.chunk)
        self.launch(chunk_inverses, self.batch * self.key_heads * self.chunks, INVERSE=inverse)
        return inverse

    def states(self) -> ChunkStates:
        """What the forward pass has before its outputs."""
        problem, heads, matrix = self.problem, self.key_heads, (self.dim, self.value_dim)
        written = problem.value
        if problem.beta is not None:
            written = self.new(heads, self.count, self.value_dim, dtype=self.factor_dtype)
        states = ChunkStates(
            before=self.new(heads, self.chunks, *matrix),
            totals_before=self.new(heads, self.chunks, self.dim) if problem.normalize else None,
            after=self.new(heads, *matrix),
            total_after=self.new(heads, self.dim) if problem.normalize else None,
            written=written,
        )
        self.over_chunks(
            chunk_states,
            INVERSE=self.inverses(),
            U=written,
            STATES=states.before,
            TOTALS=states.totals_before,
            FINAL=states.after,
            FINAL_TOTAL=states.total_after,
        )
        return states

    def outputs(self, states: ChunkStates) -> tuple[Tensor, Tensor | None]:
        """The output, and the sums that it was divided by."""
        problem = self.problem
        output = self.new(self.heads, self.count, self.value_dim, dtype=problem.query.dtype)
        row_total = self.new(self.heads, self.count) if problem.normalize else None
        self.launch(
            chunk_outputs,
            self.batch * self.heads * self.chunks,
            -(-self.value_dim // tile_of(chunk_outputs, self.problem).values),
            U=_strided(states.written),
            STATES=states.before,
            TOTALS=states.totals_before,
            OUTPUT=output,
            ROW_TOTAL=row_total,
        )
        return output, row_total

    def gradients(self, output: Tensor | None) -> RecurrenceGradients:
        """The gradients, where the arguments have the states before each chunk and what comes from above."""
        problem, beta, heads = self.problem, self.problem.beta, self.key_heads
        written, dtype = problem.value, problem.value.dtype if beta is None else self.factor_dtype
        self.arguments |= {
            "INVERSE": self.inverses(),
            "GRAD_ROW_TOTAL": self.new(self.heads, self.count) if problem.normalize else None,
            "GRAD_STATES": self.new(heads, self.chunks, self.dim, self.value_dim),
            "GRAD_TOTALS": self.new(heads, self.chunks, self.dim) if problem.normalize else None,
            "SYSTEM_WEIGHTS": None,
            "X": None,
        }
        if beta is not None:
            written = self.new(heads, self.count, self.value_dim, dtype=dtype)
            self.by_values(chunk_writes, U=written)
        self.arguments |= {"U": _strided(written), "OUTPUT": _strided(output)}
        self.arguments["WEIGHTS"] = self._weight_gradients(self.heads)
        value = self.new(heads, self.count, self.value_dim, dtype=dtype)
        state, total = self._value_and_state_gradients(value)
        if beta is not None:
            right = {"GRAD_OUTPUT": _strided(value), "ROW_TOTAL": None, "group": 1}
            self.arguments |= {"X": value, "SYSTEM_WEIGHTS": self._weight_gradients(heads, **right)}
        query, decay = self._query_gradients()
        key, decay, of_beta = self._key_gradients(decay)
        if beta is not None:
            value = (beta.unsqueeze(-1) * value).to(problem.value.dtype)
        return RecurrenceGradients(query, key, value, decay, of_beta, state, total)

    def _weight_gradients(self, heads: int, **own: Any) -> Tensor:
        """The gradients of the weights in each chunk of so many heads, (B, heads, chunks, C, C)."""
        weights = self.new(heads, self.chunks, self.chunk, self.chunk, dtype=self.factor_dtype)
        self.launch(weight_gradients, self.batch * heads * self.chunks, WEIGHTS=weights, **own)
        return weights

    def _value_and_state_gradients(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Write the gradient of u into `value`; those of the first state and total.

        With the delta rule it becomes that of the right side of its system.
        """
        state = self.new(self.key_heads, self.dim, self.value_dim)
        total = self.new(self.key_heads, self.dim) if self.problem.normalize else None
        if self.problem.beta is not None:
            self.by_values(value_gradients, GRAD_U=value)
        self.over_chunks(state_gradients, GRAD_U=value, GRAD_STATE=state, GRAD_TOTAL=total)
        if self.problem.beta is None:
            self.by_values(value_gradients, GRAD_U=value)
        return state, total

    def _query_gradients(self) -> tuple[Tensor, Tensor | None]:
        """The gradient of the queries, and what they contribute to that of the decay; None without one."""
        blocks = -(-self.dim // tile_of(query_gradients, self.problem).features)
        query = self.new(self.heads, self.count, self.dim, dtype=self.problem.query.dtype)
        decay = self._for_decay(self.heads, blocks)
        programs = self.batch * self.heads * self.chunks
        self.launch(query_gradients, programs, blocks, GRAD_Q=query, FROM_ROWS=decay)
        return query, self._sum_of_blocks(decay)

    def _key_gradients(self, from_rows: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of the keys, the decay and the beta."""
        problem, heads = self.problem, self.key_heads
        blocks = -(-self.dim // tile_of(key_and_gate_gradients, self.problem).features)
        key, decay = self.new(heads, self.count, self.dim, dtype=problem.key.dtype), self._for_decay(heads, blocks)
        beta = None if problem.beta is None else self._in_blocks(heads, blocks)
        given = {"GRAD_K": key, "FROM_ROWS": from_rows, "GRAD_DECAY": decay, "GRAD_BETA": beta}
        self.launch(key_and_gate_gradients, self.batch * heads * self.chunks, blocks, **given)
        return key, self._sum_of_blocks(decay), None if beta is None else beta.sum(0)

    def _for_decay(self, heads: int, blocks: int) -> Tensor | None:
        """Memory for gradients of the decays of so many heads, by block of features where they share one."""
        decay = self.problem.decay
        if decay is None:
            return None
        return self._in_blocks(heads, blocks) if decay.ndim == 3 else self.new(heads, self.count, self.dim)

    def _sum_of_blocks(self, of_decay: Tensor | None) -> Tensor | None:
        """The sum of what `_for_decay` has by block of features."""
        shared = self.problem.decay is not None and self.problem.decay.ndim == 3
        return of_decay.sum(0) if of_decay is not None and shared else of_decay

    def _in_blocks(self, heads: int, blocks: int) -> Tensor:
        """Memory for a number of each token and block of features, (blocks, B, heads, N)."""
        return self.problem.query.new_empty(blocks, self.batch, heads, self.count, dtype=torch.float32)


def _block(size: int) -> int:
    """The smallest block of a product that has `size` numbers."""
    return max(16, 1 << (size - 1).bit_length())


def _strided(tensor: Tensor | None) -> tuple[Tensor, int, int, int] | None:
    """An input (B, heads, N) or (B, heads, N, ·) as kernels take it, with rows without gaps; None of None."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.ndim == 4 and tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor without its history, copied if it is not contiguous; None of None."""
    return None if tensor is None else tensor.detach().contiguous()
