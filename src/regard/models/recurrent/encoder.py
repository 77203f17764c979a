"""The encoder of both translators: a bidirectional recurrent network over the source."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .cells import make_cell
from .memory import Encoded


class Encoder(nn.Module):
    """Annotation j = [→h_j; ←h_j]: each source word with what stands before and behind it.

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
        """The width of an annotation: both directions."""
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
