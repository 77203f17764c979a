"""The decoder of Bahdanau et al. (2015): the previous state asks, the context joins the input of the step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...scores import Score
from .cells import Bridge, make_cell, run
from .memory import Encoded, Memory, State, Unrolled
from .source import SourceAttention


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

    def remember(self, encoded: Encoded) -> Memory:
        """The memory that the steps look at."""
        return self.attend.remember(encoded)

    def start(self, memory: Memory) -> State:
        """s_0 = tanh(W ←h_1), from the backward encoder's last state, which stands at the first word."""
        backward = memory.encoded.last.chunk(2, dim=-1)[1]
        return State(self.bridge(backward))

    def unroll(self, embedded: Tensor, memory: Memory) -> Unrolled:
        """All steps for a known target; each asks with the state that the one before it left."""
        state = self.start(memory)
        queries, contexts, outputs = [], [], []
        for word in embedded.unbind(1):
            query = _query(state)
            context = self.attend(query, memory)
            output, hidden = run(self.cell, torch.cat([word.unsqueeze(1), context], dim=-1), state.hidden)
            state = State(hidden, step=state.step + 1)
            queries.append(query)
            contexts.append(context)
            outputs.append(output)
        features = self._features(torch.cat(outputs, 1), embedded, torch.cat(contexts, 1))
        return Unrolled(torch.cat(queries, 1), features)

    def step(self, word: Tensor, state: State, memory: Memory) -> tuple[Tensor, State, Tensor]:
        """Features [B, F], state and weights [B, S] after one embedded word [B, E]."""
        word = word.unsqueeze(1)
        context, weights = self.attend.look(_query(state), memory)
        output, hidden = run(self.cell, torch.cat([word, context], dim=-1), state.hidden)
        features = self._features(output, word, context)
        return features.squeeze(1), State(hidden, step=state.step + 1), weights.squeeze(1)

    def _features(self, output: Tensor, embedded: Tensor, context: Tensor) -> Tensor:
        """Maxout (Goodfellow et al. 2013) over pairs: [B, T, 2F] to [B, T, F]."""
        return self.readout(torch.cat([output, embedded, context], dim=-1)).unflatten(-1, (-1, 2)).amax(-1)


def _query(state: State) -> Tensor:
    """The top layer's h, [B, 1, H]."""
    return state.hidden[0][:, -1:]
