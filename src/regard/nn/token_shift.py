"""The token shift of RWKV: each map of a layer reads a mixture of a token and the one before it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..utils.numbers import whole_number


class MixedTokens(NamedTuple):
    """What the maps of a layer of linear attention read, (batch, length, dim) each."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    rule: Tensor
    gate: Tensor


class TokenShift(nn.Module):
    """x_t + μ ⊙ (x_{t-1} - x_t), with a μ for each map of a layer: query, key, value, decay, rule and output gate.

    Before the first token there are zeros. A masked token counts as zeros, and each document is shifted by itself.

    Shapes: tokens (batch, length, dim); weight (6, dim), the μ in this order, 0.5 at first.

    Args:
        dim: of the tokens.

    Raises:
        ConfigurationError: a dim below 1.

    Source: Peng et al. 2023, RWKV (arXiv 2305.13048), section 3.1.1; for each map, RWKV-7 (arXiv 2503.14456).

    >>> import torch
    >>> shift = TokenShift(1)
    >>> shift(torch.tensor([1.0, 2.0, 4.0])[None, :, None]).key[0, :, 0].tolist()
    [0.5, 1.5, 3.0]
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((len(MixedTokens._fields), whole_number("dim", dim)), 0.5))

    def forward(self, tokens: Tensor, earlier: Tensor | None = None) -> MixedTokens:
        """The mixtures; earlier: the token before each, `shifted(tokens)` by default."""
        differences = (self.shifted(tokens) if earlier is None else earlier) - tokens
        return MixedTokens(*(torch.addcmul(tokens, differences, share) for share in self.weight.unbind()))

    @staticmethod
    def shifted(tokens: Tensor, last: Tensor | None = None) -> Tensor:
        """The token before each, (batch, length, dim); last: that before the first, (batch, 1, dim), None for zeros."""
        first = tokens.new_zeros(tokens.shape[0], 1, tokens.shape[2]) if last is None else last.to(tokens.dtype)
        return torch.cat([first, tokens], 1)[:, : tokens.shape[1]]

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}"
