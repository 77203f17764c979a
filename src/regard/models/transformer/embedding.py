"""Token and position embedding, and an output layer tied to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...nn.linear import linear
from ...positions import Learned


class Embedding(nn.Module):
    """dropout(√dim · E[token] + P(position)): tokens [B, T] to vectors [B, T, dim].

    Args:
        tokens: E. One table given to several embeddings, and to `TiedOutput`, is shared by them.
        positions: P, such as `Sinusoidal(dim)` or `Learned(length, dim)`; nothing is added without it, as where
            attention turns by position.
        dropout: the probability with which a feature of the sum is dropped in training.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.4, 3.5 and 5.4.

    >>> import torch
    >>> from regard.positions import Sinusoidal
    >>> embedding = Embedding(nn.Embedding.from_pretrained(torch.tensor([[0.0, 1.0]])), Sinusoidal(2))
    >>> embedding(torch.tensor([[0, 0]]))
    tensor([[[0.0000, 2.4142],
             [0.8415, 1.9545]]])
    """

    def __init__(self, tokens: nn.Embedding, positions: nn.Module | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = math.sqrt(tokens.embedding_dim)
        self.dropout = nn.Dropout(dropout)

    @property
    def max_length(self) -> int | None:
        """The number of positions if they are learned; None: any number."""
        return self.positions.length if isinstance(self.positions, Learned) else None

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens, the first of which is at position `first`."""
        embedded = self.tokens(tokens) * self.scale
        if self.positions is not None:
            at = torch.arange(first, first + tokens.shape[-1], device=tokens.device)
            embedded = embedded + self.positions(at).to(embedded.dtype)
        return self.dropout(embedded)


class TiedOutput(nn.Module):
    """x Eᵀ: logits from the embedding table E, [..., dim] to [..., V].

    Source: Press and Wolf 2017 (arXiv 1608.05859), section 3; Vaswani et al. 2017 (arXiv 1706.03762), section 3.4.

    >>> import torch
    >>> TiedOutput(nn.Embedding.from_pretrained(torch.eye(2)))(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    bias = None
    """It adds none: what an output layer's bias would be."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.tokens = tokens

    @property
    def weight(self) -> Tensor:
        """The embedding table E, [V, dim]."""
        return self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V] of vectors [..., dim]."""
        return linear(x, self.weight)
