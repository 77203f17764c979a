"""Recurrent decoders with attention: of Bahdanau et al. (2015) and of Luong et al. (2015).

The query of the first is the state before the step, that of the second the state after it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...core.normalizer import Normalizer
from ...scores import Score
from .encoder import Bridge, make_cell, run
from .native_steps import native_decoder, packed_weights, run_steps
from .recurrent_state import Encoded, RecurrentMemory, RecurrentState, Unrolled, join_steps
from .source_attention import SourceAttention, SourceCoverage


class BahdanauDecoder(nn.Module):
    """c_t = attention(s_{t-1}), s_t = cell([E y_{t-1}; c_t], s_{t-1}), and a maxout layer over s_t, E y_{t-1}, c_t.

    Shapes: embedded target words [B, T, E] give features [B, T, readout_dim]. With `coverage`, of the same score, the
    score reads the weights of earlier steps; `normalizer` as of `SourceAttention`.

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), sections 3.1 and A.2.2. We differ in two points: the reset gate of
    torch's GRU multiplies U s + b where the paper's multiplies s before U; and the readout reads s_t, as the paper's
    Eq. 4 has it, where its appendix writes s_{t-1}.
    """

    def __init__(
        self,
        embedding_dim: int,
        annotation_dim: int,
        hidden_dim: int,
        *,
        score: Score,
        cell: str,
        readout_dim: int,
        coverage: SourceCoverage | None = None,
        normalizer: Normalizer | None = None,
    ) -> None:
        super().__init__()
        self.feature_dim = readout_dim
        self.attend = SourceAttention(score, coverage=coverage, normalizer=normalizer)
        self.cell = make_cell(cell, embedding_dim + annotation_dim, hidden_dim)
        self.bridge = Bridge(annotation_dim // 2, self.cell)
        self.readout = nn.Linear(hidden_dim + embedding_dim + annotation_dim, 2 * readout_dim)

    def project_memory(self, encoded: Encoded) -> RecurrentMemory:
        """The source with its keys projected, which the attention of every step reads."""
        return replace(self.attend.project_memory(encoded), packed=packed_weights(self.cell, self.attend))

    def start(self, memory: RecurrentMemory) -> RecurrentState:
        """s_0 = tanh(W ←h_1), from the backward encoder's last state, at the first word."""
        backward = memory.encoded.last.chunk(2, dim=-1)[1]
        return RecurrentState(self.bridge(backward), coverage=self.attend.start(memory))

    def unroll(self, embedded: Tensor, memory: RecurrentMemory) -> Unrolled:
        """All steps for a known target; the query of each is the state after the previous one."""
        state = self.start(memory)
        first = _query(state).squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, embedded, first, attends_after=False)
        if native is not None and embedded.shape[1]:
            output, context = run_steps(native, memory.packed, embedded, first)
            queries = torch.cat([_query(state), output[:, :-1]], 1)
            return Unrolled(queries, context, output, self._features(output, embedded, context))
        queries, contexts, outputs, weights = [], [], [], []
        for word in embedded.split(1, 1):
            queries.append(_query(state))
            context, row = self.attend.look(queries[-1], memory, state)
            covered = self.attend.covered(state.coverage, row, queries[-1], memory)
            output, state = self._advance(word, state, context, covered)
            contexts.append(context)
            outputs.append(output)
            weights.append(row)
        context, output = torch.cat(contexts, 1), torch.cat(outputs, 1)
        features = self._features(output, embedded, context)
        return Unrolled(torch.cat(queries, 1), context, output, features, join_steps(weights))

    def step(self, word: Tensor, state: RecurrentState, memory: RecurrentMemory) -> tuple[Unrolled, RecurrentState]:
        """One step after an embedded word [B, 1, E], and the state after it."""
        query = _query(state)
        before = query.squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, word.squeeze(1), before, attends_after=False)
        if native is None:
            return self._read(word, state, memory, query, *self.attend.look(query, memory, state))
        output, context = run_steps(native, memory.packed, word, before)
        seen = Unrolled(query, context, output, self._features(output, word, context))
        return seen, RecurrentState((output,), step=state.step + 1)

    def observe_step(
        self, word: Tensor, state: RecurrentState, memory: RecurrentMemory
    ) -> tuple[Unrolled, RecurrentState, Tensor]:
        """`step`, and the attention weights [B, 1, S]."""
        query = _query(state)
        context, weights = self.attend.with_weights(query, memory, first=state.step, coverage=state.coverage)
        return *self._read(word, state, memory, query, context, weights), weights

    def _read(
        self,
        word: Tensor,
        state: RecurrentState,
        memory: RecurrentMemory,
        query: Tensor,
        context: Tensor,
        weights: Tensor | None,
    ) -> tuple[Unrolled, RecurrentState]:
        """One step from `state`, of a query with its context, and the state after it."""
        covered = self.attend.covered(state.coverage, weights, query, memory)
        output, after = self._advance(word, state, context, covered)
        return Unrolled(query, context, output, self._features(output, word, context), weights), after

    def _advance(
        self, word: Tensor, state: RecurrentState, context: Tensor, coverage: Tensor | None
    ) -> tuple[Tensor, RecurrentState]:
        """Run the cell for one word and its context, [B, 1, ·]: s_t [B, 1, H], and the state after it."""
        output, hidden = run(self.cell, torch.cat([word, context], dim=-1), state.hidden)
        return output, RecurrentState(hidden, step=state.step + 1, coverage=coverage)

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
        return RecurrentState(self.bridge(last), attentional, coverage=self.attend.start(memory))

    def unroll(self, embedded: Tensor, memory: RecurrentMemory) -> Unrolled:
        """All steps for a known target: at once, or one by one with input feeding."""
        state = self.start(memory)
        if not self.input_feeding:
            queries, _ = run(self.cell, embedded, state.hidden)
            context, weights = self.attend.look(queries, memory, state)
            return Unrolled(queries, context, queries, self.readout(context, queries), weights)
        steps = []
        for word in embedded.split(1, 1):
            query, hidden = self._advance(word, state)
            seen, state = self._read(query, hidden, state, memory, *self.attend.look(query, memory, state))
            steps.append(seen)
        queries, contexts, features = (
            torch.cat(parts, 1)
            for parts in zip(*((seen.queries, seen.contexts, seen.features) for seen in steps), strict=True)
        )
        return Unrolled(queries, contexts, queries, features, join_steps([seen.weights for seen in steps]))

    def step(self, word: Tensor, state: RecurrentState, memory: RecurrentMemory) -> tuple[Unrolled, RecurrentState]:
        """One step after an embedded word [B, 1, E], and the state after it."""
        inputs, before = self._inputs(word, state), _query(state).squeeze(1)
        native = native_decoder(self.cell, self.attend, memory, inputs.squeeze(1), before, attends_after=True)
        if native is not None:
            query, context = run_steps(native, memory.packed, inputs, before)
            return self._read(query, (query,), state, memory, context)
        query, hidden = run(self.cell, inputs, state.hidden)
        return self._read(query, hidden, state, memory, *self.attend.look(query, memory, state))

    def observe_step(
        self, word: Tensor, state: RecurrentState, memory: RecurrentMemory
    ) -> tuple[Unrolled, RecurrentState, Tensor]:
        """`step`, and the attention weights [B, 1, S]."""
        query, hidden = self._advance(word, state)
        context, weights = self.attend.with_weights(query, memory, first=state.step, coverage=state.coverage)
        return *self._read(query, hidden, state, memory, context, weights), weights

    def _read(
        self,
        query: Tensor,
        hidden: tuple[Tensor, ...],
        state: RecurrentState,
        memory: RecurrentMemory,
        context: Tensor,
        weights: Tensor | None = None,
    ) -> tuple[Unrolled, RecurrentState]:
        """One step from `state`, from h_t and its context, both [B, 1, ·], and the state after it."""
        features = self.readout(context, query)
        attentional = features.squeeze(1) if self.input_feeding else None
        covered = self.attend.covered(state.coverage, weights, query, memory)
        after = RecurrentState(hidden, attentional, state.step + 1, covered)
        return Unrolled(query, context, query, features, weights), after

    def _advance(self, word: Tensor, state: RecurrentState) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the cell for one word [B, 1, E]: h_t [B, 1, H], and the recurrent state after it."""
        return run(self.cell, self._inputs(word, state), state.hidden)

    def _inputs(self, word: Tensor, state: RecurrentState) -> Tensor:
        """The inputs of the cell: the embedded word, and with input feeding the attentional vector."""
        return word if state.attentional is None else torch.cat([word, state.attentional.unsqueeze(1)], dim=-1)
