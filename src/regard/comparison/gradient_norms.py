"""Gradients of the query and key projections of a translator, which vanish where the softmax saturates."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigurationError
from regard.lenses import Entropy
from regard.models import Transformer
from regard.nn import Projections
from regard.translation.batches import EncodedText, collate
from regard.translation.training_loss import training_loss

PAIRS = 64
"""Pairs of the batch whose gradients are measured."""


def projection_gradients(model: object, text: EncodedText) -> dict[str, float]:
    """Gradients of W_q and W_k, of all other weights, and the entropy of the encoder's weights, for some pairs.

    - `query_key`: root mean square of the gradient of the loss, in nats per target token, over all elements of the
      query and key projections of all attentions.
    - `other`: the same of all other parameters.
    - `entropy`: mean entropy of the rows of attention weights of the encoder, as a share of the largest that their
      number of keys allows: 1 is uniform, 0 one key alone.

    The model is in eval mode then: nothing is dropped.

    Raises:
        ConfigurationError: a model without query and key projections.
    """
    if not isinstance(model, Transformer):
        raise ConfigurationError(
            f"compare.gradients measures query and key projections, and a {type(model).__name__} has none: leave it "
            "out, or compare models of kind transformer"
        )
    model.eval()
    batch = collate(text, np.arange(min(PAIRS, len(text))))
    chosen = {
        id(linear.weight)
        for module in model.modules()
        if isinstance(module, Projections)
        for linear in (module.query, module.key)
    }
    model.zero_grad()
    loss, _ = training_loss(model, batch, 0.0)
    (loss / batch.target_tokens).backward()
    parameters = [one for one in model.parameters() if one.grad is not None]
    found = {
        "query_key": _root_mean_square([one.grad for one in parameters if id(one) in chosen]),
        "other": _root_mean_square([one.grad for one in parameters if id(one) not in chosen]),
    }
    model.zero_grad()
    with torch.no_grad():
        seen = model.observe(batch.source, batch.source_lengths, batch.target_input, Entropy())
    return {
        **found,
        "entropy": _relative_entropy([block.attention[Entropy()] for block in seen.encoder], batch.source_lengths),
    }


def _root_mean_square(gradients: list[Tensor | None]) -> float:
    there = [one for one in gradients if one is not None]
    squares = sum(float(one.double().square().sum()) for one in there)
    return math.sqrt(squares / max(1, sum(one.numel() for one in there)))


def _relative_entropy(layers: list[Tensor], lengths: Tensor) -> float:
    """Mean over layers, heads and the tokens of sentences of two tokens or more; each (B, heads, S)."""
    entropies = torch.stack(layers).double().mean((0, 2))  # (B, S)
    tokens = torch.arange(entropies.shape[1]) < lengths[:, None]
    shares = entropies / lengths[:, None].clamp(min=2).log()
    return float(shares[tokens & (lengths[:, None] > 1)].mean())
