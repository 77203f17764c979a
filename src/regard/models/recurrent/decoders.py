"""Recurrent decoders with attention: of Bahdanau et al. (2015) and of Luong et al. (2015).

The query of the first is the state before the step, that of the second the state after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...scores import Score
from .encoder import Bridge, make_cell, run
from .native_steps import native_decoder, packed_weights, run_steps
from .recurrent_state import Encoded, RecurrentMemory, RecurrentState, Unrolled
from .source_attention import SourceAttention


class BahdanauDecoder(nn.Module):
    """c_t = attention(s_{t-1}), s_t = cell([E y_{t-1}; c_t], s_{t-1}), and a maxout layer over s_t, E y_{t-1}, c_t.

    Shapes: embedded target words [B, T, E] give features [B, T, readout_dim].

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), sections 3.1 and A.2.2. We differ in two points: the reset gate of
    torch's GRU multiplies U s + b where the paper's multiplies s before U; and the readout reads s_t, as the paper's
    Eq. 4 has it, where its appendix writes s_{t-1}.
    """

    def __init__(
        self, embedding_dim: int, annotation_dim: int, hidden_dim: int, *, score: Score, cell: str, readout_dim: int
    ) -> None:
        super().__init__()
        self.feature_dim = readout_dim
        self.attend = SourceAttention(score)
        self.cell = make_cell(cell, embedding_dim + annotation_dim, hidden_dim)
        self.bridge = Bridge(annotation_dim // 2, self.cell)
        self.readout = nn.Linear(hidden_dim + embedding_dim + annotation_dim, 2 * readout_dim)

    def project_memory(self, encoded: Encoded) -> RecurrentMemory:
        """The source with its keys projected, which the attention of every step reads."""
        return replace(self.attend.project_memory(encoded), packed=packed_weights(self.cell, self.attend))

    def start(self, memory: RecurrentMemory) -> RecurrentState:
        """s_0 = tanh(W ←h_1), from the backward encoder's last state, at the first word."""
        backward = memory.encoded.last.chunk(2, dim=-1)[1]
        return RecurrentState(self.bridge(backward))

    def unroll(self, embedded: Tensor, memory: RecurrentMemory) -> Unrolled:
        """All steps for a known target; the query of each is the state after the previous one."""
        state = self.start(memory)
        first = _query(state).squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, embedded, first, attends_after=False)
        if native is not None and embedded.shape[1]:
            output, context = run_steps(native, memory.packed, embedded, first)
            queries = torch.cat([_query(state), output[:, :-1]], 1)
            return Unrolled(queries, self._features(output, embedded, context))
        queries, contexts, outputs = [], [], []
        for word in embedded.unbind(1):
            query = _query(state)
            context = self.attend(query, memory)
            output, hidden = run(self.cell, torch.cat([word.unsqueeze(1), context], dim=-1), state.hidden)
            state = RecurrentState(hidden, step=state.step + 1)
            queries.append(query)
            contexts.append(context)
            outputs.append(output)
        features = self._features(torch.cat(outputs, 1), embedded, torch.cat(contexts, 1))
        return Unrolled(torch.cat(queries, 1), features)

    def step(self, word: Tensor, state: RecurrentState, memory: RecurrentMemory) -> tuple[Tensor, RecurrentState]:
        """Features [B, F] and state after one embedded word [B, E]."""
        query = _query(state)
        before = query.squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, word, before, attends_after=False)
        if native is None:
            return self._advance(word, state, self.attend(query, memory))
        output, context = run_steps(native, memory.packed, word.unsqueeze(1), before)
        features = self._features(output, word.unsqueeze(1), context).squeeze(1)
        return features, RecurrentState((output,), step=state.step + 1)

    def observe_step(
        self, word: Tensor, state: RecurrentState, memory: RecurrentMemory
    ) -> tuple[Tensor, RecurrentState, Tensor]:
        """`step`, and the attention weights [B, S]."""
        context, weights = self.attend.with_weights(_query(state), memory)
        return *self._advance(word, state, context), weights.squeeze(1)

    def _advance(self, word: Tensor, state: RecurrentState, context: Tensor) -> tuple[Tensor, RecurrentState]:
        """The cell and the features for one word and its context [B, 1, A]."""
        word = word.unsqueeze(1)
        output, hidden = run(self.cell, torch.cat([word, context], dim=-1), state.hidden)
        features = self._features(output, word, context)
        return features.squeeze(1), RecurrentState(hidden, step=state.step + 1)

    def _features(self, output: Tensor, embedded: Tensor, context: Tensor) -> Tensor:
        """Maxout (Goodfellow et al. 2013) over pairs: [B, T, 2F] to [B, T, F]."""
        return self.readout(torch.cat([output, embedded, context], dim=-1)).unflatten(-1, (-1, 2)).amax(-1)


def _query(state: RecurrentState) -> Tensor:
    """The top layer's h, [B, 1, H]."""
    return state.hidden[0][:, -1:]


class TanhReadout(nn.Module):
    """h̃ = tanh(W_c [c; h]), the attentional vector (Luong et al. 2015, Eq. 5)."""

    def __init__(self, annotation_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.feature_dim = hidden_dim
        self.project = nn.Linear(annotation_dim + hidden_dim, hidden_dim, bias=False)

    def forward(self, context: Tensor, output: Tensor) -> Tensor:
        """[B, T, A] and [B, T, H] to [B, T, H]."""
        return torch.tanh(self.project(torch.cat([context, output], dim=-1)))


class LinearReadout(nn.Module):
    """[c; h] unchanged: the output layer alone predicts from it, FC([context; state])."""

    def __init__(self, annotation_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.feature_dim = annotation_dim + hidden_dim

    def forward(self, context: Tensor, output: Tensor) -> Tensor:
        """[B, T, A] and [B, T, H] to [B, T, A + H]."""
        return torch.cat([context, output], dim=-1)


READOUTS: dict[str, type[TanhReadout] | type[LinearReadout]] = {"tanh": TanhReadout, "linear": LinearReadout}


class LuongDecoder(nn.Module):
    """h_t = cell(E y_{t-1}, h_{t-1}), c_t = attention(h_t), and a readout over [c_t; h_t].

    With input feeding the step's input is [E y_{t-1}; readout_{t-1}], so steps must wait for one another; without it
    all steps of a known target run at once.

    Shapes: embedded target words [B, T, E] give features [B, T, F], F being the readout's.

    Source: Luong et al. 2015 (arXiv 1508.04025), sections 3.1 to 3.3. We differ in the first state, which is
    tanh(W [→h; ←h]) of our bidirectional encoder.
    """

    def __init__(
        self,
        embedding_dim: int,
        annotation_dim: int,
        hidden_dim: int,
        *,
        attend: SourceAttention,
        readout: TanhReadout | LinearReadout,
        cell: str = "gru",
        layers: int = 1,
        input_feeding: bool = False,
    ) -> None:
        super().__init__()
        self.attend = attend
        self.readout = readout
        self.feature_dim = readout.feature_dim
        self.input_feeding = input_feeding
        fed_dim = readout.feature_dim if input_feeding else 0
        self.cell = make_cell(cell, embedding_dim + fed_dim, hidden_dim, layers=layers)
        self.bridge = Bridge(annotation_dim, self.cell)

    def project_memory(self, encoded: Encoded) -> RecurrentMemory:
        """The source with its keys projected, which the attention of every step reads."""
        return replace(self.attend.project_memory(encoded), packed=packed_weights(self.cell, self.attend))

    def start(self, memory: RecurrentMemory) -> RecurrentState:
        """The first state, from both ends of the encoder; the attentional vector that input feeding reads is 0."""
        last = memory.encoded.last
        attentional = last.new_zeros(last.shape[0], self.feature_dim) if self.input_feeding else None
        return RecurrentState(self.bridge(last), attentional)

    def unroll(self, embedded: Tensor, memory: RecurrentMemory) -> Unrolled:
        """All steps for a known target: at once, or one by one with input feeding."""
        state = self.start(memory)
        if not self.input_feeding:
            queries, _ = run(self.cell, embedded, state.hidden)
            return Unrolled(queries, self.readout(self.attend(queries, memory), queries))
        queries, features = [], []
        for word in embedded.unbind(1):
            query, hidden = self._advance(word, state)
            feature = self.readout(self.attend(query, memory, first=state.step), query)
            state = RecurrentState(hidden, feature.squeeze(1), state.step + 1)
            queries.append(query)
            features.append(feature)
        return Unrolled(torch.cat(queries, 1), torch.cat(features, 1))

    def step(self, word: Tensor, state: RecurrentState, memory: RecurrentMemory) -> tuple[Tensor, RecurrentState]:
        """Features [B, F] and state after one embedded word [B, E]."""
        inputs, before = self._inputs(word, state), _query(state).squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, inputs, before, attends_after=True)
        if native is not None:
            query, context = run_steps(native, memory.packed, inputs.unsqueeze(1), before)
            return self._read(query, (query,), state, context)
        query, hidden = run(self.cell, inputs.unsqueeze(1), state.hidden)
        return self._read(query, hidden, state, self.attend(query, memory, first=state.step))

    def observe_step(
        self, word: Tensor, state: RecurrentState, memory: RecurrentMemory
    ) -> tuple[Tensor, RecurrentState, Tensor]:
        """`step`, and the attention weights [B, S]."""
        query, hidden = self._advance(word, state)
        context, weights = self.attend.with_weights(query, memory, first=state.step)
        return *self._read(query, hidden, state, context), weights.squeeze(1)

    def _read(
        self, query: Tensor, hidden: tuple[Tensor, ...], state: RecurrentState, context: Tensor
    ) -> tuple[Tensor, RecurrentState]:
        """Features and state after a step from `state`, from h_t and its context, both [B, 1, ·]."""
        features = self.readout(context, query).squeeze(1)
        attentional = features if self.input_feeding else None
        return features, RecurrentState(hidden, attentional, state.step + 1)

    def _advance(self, word: Tensor, state: RecurrentState) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the cell for one word: h_t [B, 1, H], and the recurrent state after it."""
        return run(self.cell, self._inputs(word, state).unsqueeze(1), state.hidden)

    def _inputs(self, word: Tensor, state: RecurrentState) -> Tensor:
        """The inputs of the cell: the embedded word, and with input feeding the attentional vector."""
        return word if state.attentional is None else torch.cat([word, state.attentional], dim=-1)
