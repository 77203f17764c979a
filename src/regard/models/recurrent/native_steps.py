"""The steps of a recurrent decoder in native code: one call for one step or many, and one for their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ... import native
from ...backends.cpu.gru_decoder import DecoderRun, DecoderWeights, GruDecoder, PackedWeights
from ...backends.cpu.library import last_contiguous
from ...core.torch_modes import under_transform
from ...scores import Additive, Concat, Dot, General, ScaledDot, Score
from ..watched_modules import WatchedModules
from .recurrent_state import RecurrentMemory
from .source_attention import GlobalWindow, SourceAttention


def native_decoder(
    cell: nn.RNNBase,
    attend: SourceAttention,
    memory: RecurrentMemory,
    inputs: Tensor,
    hidden: Tensor,
    *,
    attends_after: bool,
) -> GruDecoder | None:
    """The native steps of a decoder over a source; None where modules and kernels are to run them.

    Native code has one layer of a GRU, global softmax attention by any score but those of location or of a user's own
    and without coverage, and float32 on a CPU; with gradients it has steps that attend first. Modules with hooks, an
    attention hook, autocast, torch's transforms and modes: all see every call of a module or of attention.

    Shapes: inputs (B, T, E) or (B, E), hidden (B, H) before the first step.
    """
    if attends_after and torch.is_grad_enabled():
        return None
    weights = _weights(cell, attend)
    watched = WatchedModules((cell, attend, attend.score, attend.window))
    if weights is None or not native.available() or watched.are_watched():
        return None
    matrices, scale = weights
    keys, values, lengths = last_contiguous(memory.keys), last_contiguous(memory.values), memory.lengths
    floats = [tensor for tensor in (*matrices, keys, values, inputs, hidden) if tensor is not None]
    if not all(type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu for tensor in (*floats, lengths)):
        return None
    context_dim = 0 if attends_after else values.shape[-1]
    key_dim, query_dim = (keys.shape[-1],) * 2 if matrices.query is None else matrices.query.shape
    fits = (
        all(tensor.dtype is torch.float32 for tensor in floats)
        and lengths.dtype is torch.int64
        and len(inputs) == len(hidden) == len(keys) == len(values) == len(lengths)
        and keys.shape[1:] == (values.shape[1], key_dim)
        and cell.input_size == inputs.shape[-1] + context_dim
        and cell.hidden_size == hidden.shape[-1] == query_dim
    )
    return GruDecoder(matrices, keys, values, lengths.contiguous(), scale, attends_after) if fits else None


def packed_weights(cell: nn.RNNBase, attend: SourceAttention) -> PackedWeights | None:
    """The weights for steps without gradients, packed once for all of them; None where there are no native steps."""
    weights = None if torch.is_grad_enabled() or under_transform() else _weights(cell, attend)
    if weights is None or not native.available():
        return None
    plain = all(tensor is None or (tensor.is_cpu and tensor.dtype is torch.float32) for tensor in weights[0])
    return PackedWeights.forward(weights[0]) if plain else None


def run_steps(
    decoder: GruDecoder, packed: PackedWeights | None, inputs: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """States (B, T, H) and contexts (B, T, D) for inputs (B, T, E) from the state (B, H); Autograd sees all of it.

    Steps that attend after the cell have no gradients in native code: with gradients the formula computes them.
    """
    tensors = inputs, hidden, decoder.keys, decoder.values, *decoder.weights
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        if decoder.attends_after:
            return decoder_formula(decoder, inputs, hidden)
        return _DecoderSteps.apply(decoder.lengths, decoder.scale, *tensors)  # type: ignore[return-value]
    done = decoder.run(packed or PackedWeights.forward(decoder.weights), inputs, hidden)
    return done.states, done.contexts


class _DecoderSteps(torch.autograd.Function):
    """All steps of a known target that attend first; second derivatives are those of the formula."""

    @staticmethod
    def forward(ctx: Any, lengths: Tensor, scale: float, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        inputs, hidden, keys, values, *weights = tensors
        decoder = GruDecoder(DecoderWeights(*weights), keys, values, lengths, scale)
        done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden, keep=True)
        ctx.scale, ctx.inputs = scale, len(tensors)
        ctx.save_for_backward(*tensors, lengths, *(done.kept or ()), done.states, done.contexts)
        return done.states, done.contexts

    @staticmethod
    def backward(ctx: Any, grad_states: Tensor, grad_contexts: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        tensors, (lengths, *kept, states, contexts) = saved[: ctx.inputs], saved[ctx.inputs :]
        inputs, hidden, keys, values, *weights = tensors
        decoder = GruDecoder(DecoderWeights(*weights), keys, values, lengths, ctx.scale)
        if torch.is_grad_enabled():
            return None, None, *_differentiate(decoder, inputs, hidden, (grad_states, grad_contexts))
        done = DecoderRun(inputs.contiguous(), hidden.contiguous(), states, contexts, tuple(kept))
        found = decoder.gradients(PackedWeights.backward(decoder.weights), done, grad_states, grad_contexts)
        return None, None, found.inputs, found.hidden, found.keys, found.values, *found.weights


def _differentiate(
    decoder: GruDecoder, inputs: Tensor, hidden: Tensor, upstream: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, of the formula."""
    tensors = inputs, hidden, decoder.keys, decoder.values, *decoder.weights
    asked = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(decoder_formula(decoder, inputs, hidden), asked, upstream, create_graph=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in tensors]


def _weights(cell: nn.RNNBase, attend: SourceAttention) -> tuple[DecoderWeights, float] | None:
    """The weights of cell and score, and the scale of dot products; None of others than native code has."""
    if type(cell) is not nn.GRU or type(attend) is not SourceAttention or type(attend.window) is not GlobalWindow:
        return None
    if attend.coverage is not None or attend.normalizer is not None:
        return None
    if cell.num_layers != 1 or not cell.bias or not cell.batch_first or cell.bidirectional:
        return None
    of_score = _score_weights(attend.score, cell.hidden_size)
    if of_score is None:
        return None
    query, score, scale = of_score
    gru: Any = cell  # whose parameters have no types
    of_cell = gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0
    return DecoderWeights(*of_cell, query, score), scale


def _score_weights(score: Score, dim: int) -> tuple[Tensor | None, Tensor | None, float] | None:
    """The query's projection, the weight of an additive score, and the scale."""
    kind = type(score)
    if kind is Dot:
        return None, None, 1.0
    if isinstance(score, ScaledDot) and kind is ScaledDot:
        return None, None, dim**-0.5 if score.scale is None else score.scale
    if isinstance(score, General) and kind is General:
        return score.weight.T, None, 1.0
    if isinstance(score, Additive) and kind is Additive:
        return score.query_weight, score.weight, 1.0
    if isinstance(score, Concat) and kind is Concat:
        return score.matrix[:, : score.query_dim], score.weight, 1.0
    return None


def decoder_formula(decoder: GruDecoder, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """States (B, T, H) and contexts (B, T, D) of `decoder.run`.

    With c(h) = Σ_j softmax(score(h, key_j))_j value_j over the length of each source:

        h_t = gru([x_t; c_t], h_{t-1}), c_t = c(h_{t-1})      steps that attend first
        h_t = gru(x_t, h_{t-1}),        c_t = c(h_t)          steps that attend after the cell
    """
    weights, states, contexts = decoder.weights, [], []
    attend = _attention_formula(decoder)
    for word in inputs.unbind(1):
        context = None if decoder.attends_after else attend(hidden)
        cell_input = word if context is None else torch.cat([word, context], dim=-1)
        hidden = torch.gru_cell(
            cell_input, hidden, weights.input, weights.state, weights.input_bias, weights.state_bias
        )
        states.append(hidden)
        contexts.append(attend(hidden) if context is None else context)
    return torch.stack(states, 1), torch.stack(contexts, 1)


def _attention_formula(decoder: GruDecoder) -> Callable[[Tensor], Tensor]:
    """The context (B, D) of a state (B, H)."""
    weights, keys = decoder.weights, decoder.keys
    # What is behind the end of a source may be anything: NaN times a weight of 0 would be NaN.
    absent = torch.arange(keys.shape[1], device=keys.device) >= decoder.lengths.unsqueeze(1)  # [B, S]
    keys, values = (tensor.masked_fill(absent.unsqueeze(-1), 0.0) for tensor in (keys, decoder.values))

    def context(hidden: Tensor) -> Tensor:
        query = hidden if weights.query is None else hidden @ weights.query.T
        if weights.score is None:
            scores = decoder.scale * (keys @ query.unsqueeze(-1)).squeeze(-1)
        else:
            scores = (query.unsqueeze(1) + keys).tanh() @ weights.score
        exponentials = (scores - scores.amax(1, keepdim=True).detach()).exp().masked_fill(absent, 0.0)
        total = exponentials.sum(1, keepdim=True)
        shares = exponentials / total.masked_fill(total == 0, 1.0)
        return (shares.unsqueeze(1) @ values).squeeze(1)

    return context
