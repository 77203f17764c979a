"""The steps of a GRU decoder with attention in one native call, and their gradients in another.

The structure is explained in gru_decoder.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigurationError
from . import library
from .panels import pack
from .threads import run_units, thread_count

MOST_ROWS, GROUP = 64, 8
"""Rows that a thread takes through all steps at once: at most, and a multiple of the second."""
LEAST_WORK = 2**20
"""The fewest multiplications a thread."""


class GruDecoderStruct(ctypes.Structure):
    """The structure `gru_decoder` of gru_decoder.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "unit")),
        *((name, c_int64) for name in ("rows", "steps", "input_dim", "hidden_dim", "keys", "key_dim", "value_dim")),
        *(("attends_after", c_int64), ("lengths", c_void_p), ("input", c_void_p), ("hidden", c_void_p)),
        *(("key", c_void_p), ("key_batch", c_int64), ("key_row", c_int64)),
        *(("value", c_void_p), ("value_batch", c_int64), ("value_row", c_int64)),
        *((name, c_void_p) for name in ("input_weight", "state_weight", "query_weight")),
        *((name, c_void_p) for name in ("input_bias", "state_bias", "score_weight")),
        ("scale", c_double),
        *((name, c_void_p) for name in ("states", "contexts", "weights", "queries", "gates")),
        *((name, c_void_p) for name in ("grad_states", "grad_contexts", "grad_input", "grad_hidden")),
        *((name, c_void_p) for name in ("grad_key", "grad_value", "grad_queries")),
        *((name, c_void_p) for name in ("grad_input_gates", "grad_state_gates", "grad_score_weight")),
    )


class DecoderWeights(NamedTuple):
    """Weights of a GRU and of its attention, as torch's GRU has them: gates reset, update, new, (3H, ·) and (3H,).

    query (A, H), or None where the query is the state itself; score (A,), of an additive score, or None for dot
    products.
    """

    input: Tensor
    state: Tensor
    input_bias: Tensor
    state_bias: Tensor
    query: Tensor | None
    score: Tensor | None


class PackedWeights(NamedTuple):
    """The matrices of `DecoderWeights` as C reads them: input, state and query."""

    input: Tensor
    state: Tensor
    query: Tensor | None

    @classmethod
    def forward(cls, weights: DecoderWeights) -> PackedWeights:
        """For products of the inputs of the three."""
        query = None if weights.query is None else pack(weights.query.T)
        return cls(pack(weights.input.T), pack(weights.state.T), query)

    @classmethod
    def backward(cls, weights: DecoderWeights) -> PackedWeights:
        """For products of gradients of their results."""
        return cls(pack(weights.input), pack(weights.state), None if weights.query is None else pack(weights.query))


@dataclass(frozen=True, eq=False)
class GruDecoder:
    """A decoder over sources: keys (B, S, A), values (B, S, D), lengths (B,) int64, all float32 on the CPU.

    attends_after: a step attends with the state after it, as Luong's; else its context is an input of the cell, as
    Bahdanau's. scale: of dot products, and 1 for additive scores. Autograd sees nothing of it.
    """

    weights: DecoderWeights
    keys: Tensor
    values: Tensor
    lengths: Tensor
    scale: float = 1.0
    attends_after: bool = False

    def run(self, packed: PackedWeights, inputs: Tensor, hidden: Tensor, keep: bool = False) -> DecoderRun:
        """All steps for inputs (B, T, E) from the hidden state (B, H).

        packed: `PackedWeights.forward`. keep: also what the backward pass reads.
        """
        rows, steps, _ = inputs.shape
        inputs, hidden = inputs.detach().contiguous(), hidden.detach().contiguous()
        kept = None
        if keep:
            sizes = self.keys.shape[1], self.keys.shape[2], 4 * hidden.shape[1]
            kept = tuple(inputs.new_empty(rows, steps, size) for size in sizes)
        states, contexts = (inputs.new_empty(rows, steps, size) for size in (hidden.shape[1], self.values.shape[2]))
        done = DecoderRun(inputs, hidden, states, contexts, kept)
        self._call(library.current().gru_decoder, packed, done)
        return done

    def gradients(
        self, packed: PackedWeights, done: DecoderRun, grad_states: Tensor, grad_contexts: Tensor
    ) -> DecoderGradients:
        """The gradients of a run that was kept, of steps that attend first; packed: `PackedWeights.backward`.

        Raises:
            ConfigurationError: steps that attend after the cell.
        """
        if self.attends_after:
            raise ConfigurationError(
                "native code has no gradients of steps that attend after the cell (attends_after=True): differentiate "
                "the formula, as models.recurrent does"
            )
        hidden_dim, key_dim = done.hidden.shape[1], self.keys.shape[2]
        rows, steps = done.inputs.shape[:2]
        work = {
            "grad_states": grad_states.contiguous(),
            "grad_contexts": grad_contexts.contiguous(),
            "grad_input": torch.empty_like(done.inputs),
            "grad_hidden": torch.empty_like(done.hidden),
            "grad_key": self.keys.new_zeros(self.keys.shape),
            "grad_value": self.values.new_zeros(self.values.shape),
            "grad_queries": done.inputs.new_empty(rows, steps, key_dim),
            "grad_input_gates": done.inputs.new_empty(rows, steps, 3 * hidden_dim),
            "grad_state_gates": done.inputs.new_empty(rows, steps, 3 * hidden_dim),
            "grad_score_weight": done.inputs.new_zeros(max(rows, 1), key_dim),
        }
        self._call(library.current().gru_decoder_backward, packed, done, **work)
        of_input, of_state, of_query = (
            work[name].flatten(0, 1) for name in ("grad_input_gates", "grad_state_gates", "grad_queries")
        )
        before = torch.cat([done.hidden.unsqueeze(1), done.states[:, :-1]], 1).flatten(0, 1)
        cell_inputs = torch.cat([done.inputs, done.contexts], -1).flatten(0, 1)
        weights = DecoderWeights(
            of_input.T @ cell_inputs,
            of_state.T @ before,
            of_input.sum(0),
            of_state.sum(0),
            None if self.weights.query is None else of_query.T @ before,
            None if self.weights.score is None else work["grad_score_weight"].sum(0),
        )
        return DecoderGradients(weights, work["grad_input"], work["grad_hidden"], work["grad_key"], work["grad_value"])

    def _call(self, function: Any, packed: PackedWeights, done: DecoderRun, **gradients: Tensor) -> None:
        rows, steps, input_dim = done.inputs.shape
        hidden_dim, (_, keys, key_dim), value_dim = done.hidden.shape[1], self.keys.shape, self.values.shape[2]
        work = steps * (3 * hidden_dim * (input_dim + value_dim + hidden_dim) + hidden_dim * key_dim)
        threads = thread_count(rows * work, LEAST_WORK)
        unit = unit_rows(rows, threads)
        weights = self.weights
        kept = (None, None, None) if done.kept is None else done.kept
        struct = GruDecoderStruct(
            *(0, -(-rows // unit), 0, unit, rows, steps, input_dim, hidden_dim, keys, key_dim, value_dim),
            *(int(self.attends_after), self.lengths.data_ptr(), done.inputs.data_ptr(), done.hidden.data_ptr()),
            *(self.keys.data_ptr(), *self.keys.stride()[:2], self.values.data_ptr(), *self.values.stride()[:2]),
            *(_address(tensor) for tensor in packed),
            *(_address(tensor) for tensor in (weights.input_bias, weights.state_bias, weights.score)),
            self.scale,
            *(_address(tensor) for tensor in (done.states, done.contexts, *kept)),
            **{name: tensor.data_ptr() for name, tensor in gradients.items()},
        )
        run_units(function, struct, threads)


class DecoderRun(NamedTuple):
    """Steps that were computed: inputs (B, T, E), first state (B, H), states (B, T, H) and contexts (B, T, D).

    kept: what the backward pass reads: weights (B, T, S), queries (B, T, A) and gates (B, T, 4H).
    """

    inputs: Tensor
    hidden: Tensor
    states: Tensor
    contexts: Tensor
    kept: tuple[Tensor, ...] | None


class DecoderGradients(NamedTuple):
    """Gradients of the weights, the inputs (B, T, E), the first state (B, H), keys and values."""

    weights: DecoderWeights
    inputs: Tensor
    hidden: Tensor
    keys: Tensor
    values: Tensor


def unit_rows(rows: int, threads: int) -> int:
    """Rows of a unit, so that all threads have as many units, of at most MOST_ROWS rows."""
    each = -(-rows // (threads * MOST_ROWS))
    return max(-(-rows // (threads * each * GROUP)) * GROUP if each else GROUP, GROUP)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
