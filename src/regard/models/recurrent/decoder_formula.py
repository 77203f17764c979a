"""The steps of a decoder that attends before each as formulas of torch, with derivatives of any order."""

from __future__ import annotations

import torch
from torch import Tensor

from ...native.gru_decoder import GruDecoder


def decoder_formula(decoder: GruDecoder, inputs: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """States (B, T, H) and contexts (B, T, D) of `decoder.run`.

    c_t = Σ_j softmax(score(h_{t-1}, key_j))_j value_j over the length of each source, h_t = gru([x_t; c_t], h_{t-1}).
    """
    weights, keys = decoder.weights, decoder.keys
    # What is behind the end of a source may be anything: NaN times a weight of 0 would be NaN.
    absent = torch.arange(keys.shape[1], device=keys.device) >= decoder.lengths.unsqueeze(1)  # [B, S]
    keys, values = (tensor.masked_fill(absent.unsqueeze(-1), 0.0) for tensor in (keys, decoder.values))
    states, contexts = [], []
    for word in inputs.unbind(1):
        query = hidden if weights.query is None else hidden @ weights.query.T
        if weights.score is None:
            scores = decoder.scale * (keys @ query.unsqueeze(-1)).squeeze(-1)
        else:
            scores = (query.unsqueeze(1) + keys).tanh() @ weights.score
        exponentials = (scores - scores.amax(1, keepdim=True).detach()).exp().masked_fill(absent, 0.0)
        total = exponentials.sum(1, keepdim=True)
        shares = exponentials / total.masked_fill(total == 0, 1.0)
        context = (shares.unsqueeze(1) @ values).squeeze(1)
        cell_input = torch.cat([word, context], dim=-1)
        hidden = torch.gru_cell(
            cell_input, hidden, weights.input, weights.state, weights.input_bias, weights.state_bias
        )
        states.append(hidden)
        contexts.append(context)
    return torch.stack(states, 1), torch.stack(contexts, 1)
