"""A step of a Transformer's decoder in one native call: the structures are explained in transformer_step.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .gru_decoder import unit_rows
from .panels import PackedMatrix, PackedMatrixStruct
from .threads import run_units, thread_count

LEAST_WORK = 2**20
"""The fewest multiplications a thread."""


class Activation(IntEnum):
    """Activations of the feed-forward network, as in transformer_step.h."""

    RECTIFIED = 0
    SILU = 1


class StepNormStruct(ctypes.Structure):
    """The structure `step_norm` of transformer_step.h."""

    _fields_ = (("gain", c_void_p), ("shift", c_void_p), ("epsilon", c_double))


class StepLayerStruct(ctypes.Structure):
    """The structure `step_layer` of transformer_step.h."""

    _fields_ = (
        *((name, PackedMatrixStruct) for name in ("own", "own_output", "query", "output", "up", "down")),
        *((name, StepNormStruct) for name in ("own_norm", "norm", "feed_forward_norm")),
    )


class StepSourceStruct(ctypes.Structure):
    """The structure `step_source` of transformer_step.h."""

    _fields_ = (
        *(("key", c_void_p), ("value", c_void_p), ("key_batch", c_int64), ("key_head", c_int64), ("key_row", c_int64)),
        *(("value_batch", c_int64), ("value_head", c_int64), ("value_row", c_int64)),
    )


class TransformerStepStruct(ctypes.Structure):
    """The structure `transformer_step` of transformer_step.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "unit")),
        *((name, c_int64) for name in ("rows", "dim", "hidden_dim", "layer_count", "heads", "key_heads", "head_dim")),
        *((name, c_int64) for name in ("norm_first", "activation", "recurrent", "before", "keys", "shared")),
        *(("layers", c_void_p), ("sources", c_void_p), ("lengths", c_void_p)),
        *(("past", c_void_p), ("past_rows", c_void_p), ("table", c_void_p)),
        ("last_norm", StepNormStruct),
        *((name, c_void_p) for name in ("input", "own", "features", "weights", "self_weights")),
    )


class Affine(NamedTuple):
    """x Wᵀ + b: weight (out, in), bias (out,) or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def joined(cls, *parts: Affine) -> Affine:
        """Several maps of the same input as one, their outputs side by side."""
        weight = torch.cat([part.weight for part in parts])
        if all(part.bias is None for part in parts):
            return cls(weight, None)
        biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
        return cls(weight, torch.cat(biases))


class LayerNormWeights(NamedTuple):
    """The gain (dim,) of a layer norm, its shift (dim,) or None, and what is added to the variance."""

    gain: Tensor
    shift: Tensor | None
    epsilon: float


class LayerWeights(NamedTuple):
    """The weights of a layer: maps of its two attentions and its feed-forward network, and the norm of each.

    own: joined, those of queries, keys and values of the target, or of what a recurrent unit writes and of its gates.
    """

    own: Affine
    own_output: Affine | None  # a recurrent unit has none
    query: Affine
    output: Affine
    up: Affine
    down: Affine
    own_norm: LayerNormWeights
    norm: LayerNormWeights
    feed_forward_norm: LayerNormWeights


class DecoderShape(NamedTuple):
    """What all layers have in common; heads of the target's attention and of that to the source are alike.

    recurrent: whether an SSRU is in the place of the target's attention.
    """

    heads: int
    key_heads: int
    head_dim: int
    norm_first: bool
    activation: Activation
    recurrent: bool = False

    @property
    def key_width(self) -> int:
        """Features of the keys of a token, all heads together."""
        return self.key_heads * self.head_dim


class Source(NamedTuple):
    """Keys and values of each layer (sentences, key heads, S, head dim), and the lengths (sentences,) int64."""

    layers: Sequence[tuple[Tensor, Tensor]]
    lengths: Tensor


class StepResult(NamedTuple):
    """Features (R, dim) of the token, and what later steps read of it; weights of all heads, if asked.

    own: keys and values (L, 2, R, key heads · head dim), or states (L, 1, R, dim). weights (R, L, H, S), self_weights
    (R, L, H, tokens so far), None of a recurrent decoder.
    """

    features: Tensor
    own: Tensor
    weights: Tensor | None
    self_weights: Tensor | None


@dataclass(frozen=True, eq=False)
class TransformerDecoder:
    """The weights of a decoder as C reads them; Autograd sees nothing of its steps.

    Made by `pack_weights`. layers: the structures, which point into `kept`.
    """

    shape: DecoderShape
    dim: int
    hidden_dim: int
    layers: ctypes.Array[StepLayerStruct]
    last_norm: StepNormStruct
    kept: tuple[PackedMatrix | Tensor, ...]

    @classmethod
    def pack_weights(
        cls,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        last_norm: LayerNormWeights | None,
        *,
        in_bytes: bool = False,
    ) -> TransformerDecoder:
        """Pack the weights of all layers, float32 on the CPU; in bytes: the matrices are rounded."""
        kept: list[PackedMatrix | Tensor] = []
        structs = (StepLayerStruct * len(layers))(*(_layer(layer, in_bytes, kept) for layer in layers))
        last = StepNormStruct() if last_norm is None else _norm(last_norm, kept)
        up = layers[0].up.weight
        return cls(shape, up.shape[1], len(up), structs, last, tuple(kept))

    def step(
        self, inputs: Tensor, past: Sequence[Tensor], table: Tensor, source: Source, *, observe: bool = False
    ) -> StepResult:
        """The next token of each row.

        inputs (R, dim); past: `own` of each earlier step, of as many rows as that had; table (R, len(past)) int32: the
        row of each earlier step that each row continues. Of a recurrent decoder only the last step is read, and both
        may leave out those before. Of the source's sentences each is that of as many rows.
        """
        rows, shape, layers, before = len(inputs), self.shape, len(self.layers), len(past)
        inputs, table, keys = inputs.detach().contiguous(), table.contiguous(), source.layers[0][0].shape[2]
        own = inputs.new_empty(layers, *((1, rows, self.dim) if shape.recurrent else (2, rows, shape.key_width)))
        weights = self_weights = None
        if observe:
            weights = inputs.new_empty(rows, layers, shape.heads, keys)
            self_weights = None if shape.recurrent else inputs.new_empty(rows, layers, shape.heads, before + 1)
        result = StepResult(torch.empty_like(inputs), own, weights, self_weights)
        sources = (StepSourceStruct * layers)(*(_source(*of_layer) for of_layer in source.layers))
        threads = thread_count(rows * layers * self.dim * (6 * self.dim + 2 * self.hidden_dim), LEAST_WORK)
        unit = unit_rows(rows, threads)
        addresses = (c_void_p * before)(*(one.data_ptr() for one in past))
        counts = (c_int64 * before)(*(one.shape[2] for one in past))
        work = TransformerStepStruct(
            *(0, -(-rows // unit), 0, unit, rows, self.dim, self.hidden_dim, layers, *shape, before, keys),
            *(max(rows // max(len(source.lengths), 1), 1), ctypes.addressof(self.layers), ctypes.addressof(sources)),
            *(source.lengths.data_ptr(), ctypes.addressof(addresses), ctypes.addressof(counts), table.data_ptr()),
            self.last_norm,
            *(inputs.data_ptr(), own.data_ptr(), result.features.data_ptr(), _address(weights), _address(self_weights)),
        )
        run_units(library.current().transformer_step, work, threads)
        return result


def _layer(layer: LayerWeights, in_bytes: bool, kept: list[PackedMatrix | Tensor]) -> StepLayerStruct:
    maps = (_map(part, in_bytes, kept) for part in layer[:6])
    return StepLayerStruct(*maps, *(_norm(part, kept) for part in layer[6:]))


def _map(part: Affine | None, in_bytes: bool, kept: list[PackedMatrix | Tensor]) -> PackedMatrixStruct:
    if part is None:
        return PackedMatrixStruct()
    kept.append(packed := PackedMatrix.of(part.weight, part.bias, in_bytes=in_bytes))
    return packed.struct()


def _norm(norm: LayerNormWeights, kept: list[PackedMatrix | Tensor]) -> StepNormStruct:
    gain, shift = norm.gain.detach().contiguous(), None if norm.shift is None else norm.shift.detach().contiguous()
    kept += [gain] if shift is None else [gain, shift]
    return StepNormStruct(gain.data_ptr(), _address(shift), norm.epsilon)


def _source(keys: Tensor, values: Tensor) -> StepSourceStruct:
    return StepSourceStruct(keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
