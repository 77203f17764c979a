"""Recurrent cells with their state batch first, so that a state can be reordered by rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import ConfigurationError, nearest

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
    """How many tensors a state has: h of a GRU, h and c of an LSTM."""
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
