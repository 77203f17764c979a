"""The bidirectional recurrent encoder of the source, and recurrent cells whose states are batch first."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ...errors import ConfigurationError, nearest
from .recurrent_state import Encoded

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}


def make_cell(
    cell: str, input_dim: int, hidden_dim: int, *, layers: int = 1, bidirectional: bool = False
) -> nn.RNNBase:
    """A GRU (Cho et al. 2014, arXiv 1406.1078) or an LSTM (Hochreiter and Schmidhuber 1997) of torch's, batch first.

    Raises:
        ConfigurationError: the cell is neither.
    """
    if cell not in CELLS:
        raise ConfigurationError(f"cell is {cell!r}; {nearest(cell, CELLS)}")
    return CELLS[cell](input_dim, hidden_dim, layers, batch_first=True, bidirectional=bidirectional)


def states_of(cell: nn.RNNBase) -> int:
    """The number of tensors in the state of a cell: h of a GRU, h and c of an LSTM."""
    return 2 if isinstance(cell, nn.LSTM) else 1


def run(cell: nn.RNNBase, inputs: Tensor, hidden: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Outputs [B, T, H] and the state after inputs [B, T, I]; each part of a state is [B, layers, H]."""
    parts = tuple(part.transpose(0, 1).contiguous() for part in hidden)
    outputs, after = cell(inputs, parts if isinstance(cell, nn.LSTM) else parts[0])
    after = after if isinstance(after, tuple) else (after,)
    return outputs, tuple(part.transpose(0, 1) for part in after)


class Bridge(nn.Module):
    """tanh(W x) as the first state of a decoder, one W for each part and layer: x is a last state of the encoder.

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section A.2.2, for the first state of its decoder.
    """

    def __init__(self, input_dim: int, cell: nn.RNNBase) -> None:
        super().__init__()
        self.layers, self.parts = cell.num_layers, states_of(cell)
        self.project = nn.Linear(input_dim, self.parts * self.layers * cell.hidden_size)

    def forward(self, last: Tensor) -> tuple[Tensor, ...]:
        """The state [B, layers, H] per part, from [B, input dim]."""
        return torch.tanh(self.project(last)).unflatten(-1, (self.parts, self.layers, -1)).unbind(1)


class BidirectionalEncoder(nn.Module):
    """Annotation j = [→h_j; ←h_j]: the states of a forward and a backward recurrent network at source word j.

    Shapes: embedded source [B, S, E], lengths [B] (all at least 1) give annotations [B, S, 2 · hidden_dim], zero
    behind each sentence's end.

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section 3.2.
    """

    def __init__(
        self, input_dim: int, hidden_dim: int, *, cell: str = "gru", layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.dropout = nn.Dropout(dropout)
        dims = [input_dim] + [2 * hidden_dim] * (layers - 1)
        self.layers = nn.ModuleList(make_cell(cell, dim, hidden_dim, bidirectional=True) for dim in dims)

    @property
    def annotation_dim(self) -> int:
        """The number of features of an annotation, both directions together."""
        return 2 * self.hidden_dim

    def forward(self, embedded: Tensor, lengths: Tensor) -> Encoded:
        """The annotations, and the last state of each direction of the top layer."""
        inputs, size = embedded, embedded.shape[1]
        last = inputs
        for index, layer in enumerate(self.layers):
            packed = pack_padded_sequence(
                inputs if index == 0 else self.dropout(inputs), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            outputs, state = layer(packed)
            inputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=size)
            last = state[0] if isinstance(state, tuple) else state  # [2, B, H]
        return Encoded(inputs, lengths, torch.cat([last[0], last[1]], dim=-1))


class LastStates(nn.Module):
    """Annotation j = [→h_S; ←h_1], alike at each word j: a sentence as one vector, for a decoder without attention.

    The mean of equal vectors is that vector, whatever the weights: each step of the decoder has the same context, as in
    the RNN Encoder-Decoder. The weights are equal, and the parameters of the score have no gradient.

    Shapes: as of the encoder, whose last states these are.

    Source: Cho et al. 2014 (arXiv 1406.1078), section 2.2. We differ in the encoder, which reads in both directions, so
    that the one vector is as wide as an annotation.
    """

    def __init__(self, encoder: BidirectionalEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    @property
    def annotation_dim(self) -> int:
        """The number of features of an annotation, both directions together."""
        return self.encoder.annotation_dim

    def forward(self, embedded: Tensor, lengths: Tensor) -> Encoded:
        """The last states as the annotation of each word, zero behind each sentence's end."""
        encoded = self.encoder(embedded, lengths)
        present = torch.arange(embedded.shape[1], device=lengths.device) < lengths.unsqueeze(1)  # [B, S]
        return replace(encoded, annotations=encoded.last.unsqueeze(1) * present.unsqueeze(-1))
