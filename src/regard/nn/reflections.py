"""The reflections of PaTH attention: of each token a direction and how much of it is turned, for each key head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.score_forms import at_least_float32
from .l2_norm import L2Norm
from .linear import Linear
from .output_gate import low_rank
from .projections import Projections, init_xavier
from .short_convolution import ShortConvolution
from .token_mask import ALL_TOKENS, TokenMask


@dataclass(frozen=True, eq=False)
class TokenReflections:
    """H = I - β w wᵀ of some tokens: vectors w (batch, key heads, M, D), beta (batch, key heads, M).

    tail: the last rows of the convolution, which the tokens after them read; None without one.
    """

    vectors: Tensor
    beta: Tensor
    tail: Tensor | None

    def after(self, keys: Tensor) -> TokenReflections:
        """The same after keys (batch, key heads, N, D) that no token of theirs has to turn."""
        of_keys = torch.zeros_like(keys)
        vectors = torch.cat([of_keys.to(self.vectors.dtype), self.vectors], -2)
        return TokenReflections(vectors, torch.cat([of_keys[..., 0].to(self.beta.dtype), self.beta], -1), self.tail)


class Reflections(nn.Module):
    """w = norm(convolution(W x)) and β = 2 σ(B x + b): a reflection for each token and key head.

    β = 2 mirrors, 1 erases, 0 leaves all as it is. A token that does not exist has β = 0.

    Shapes: tokens (batch, length, dim).

    Args:
        projections: those of the layer, which say the dims.
        rank: of W, which is then a product of two maps; None for one map, as with few key heads.
        width: tokens that the convolution reads, the own among them; 1 for no convolution.

    Raises:
        ConfigurationError: a rank or a width below 1.

    Source: Yang et al. 2025, PaTH Attention (arXiv 2505.16381), section 3.1; rank 32 and the SiLU after the convolution
    are those of the code released with it.

    >>> import torch, regard
    >>> reflections = Reflections(regard.nn.Projections(16, num_heads=4, num_kv_heads=2))
    >>> of_tokens = reflections(torch.randn(1, 5, 16))
    >>> of_tokens.vectors.shape, of_tokens.beta.shape, of_tokens.tail.shape
    (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 5]), torch.Size([1, 2, 8]))
    """

    def __init__(self, projections: Projections, *, rank: int | None = 32, width: int = 3) -> None:
        super().__init__()
        self.heads = projections.num_kv_heads
        features = self.heads * projections.head_dim
        self.direction = low_rank(projections.dim, features, rank, bias=False)
        self.convolution = None if width == 1 else ShortConvolution(features, width)
        self.norm = L2Norm(projections.head_dim)
        self.beta = Linear(projections.dim, self.heads)
        init_xavier(self.beta)

    def forward(
        self, tokens: Tensor, token_mask: TokenMask = ALL_TOKENS, before: Tensor | None = None
    ) -> TokenReflections:
        """The reflections of the tokens that a mask leaves; before: the `tail` of those before them."""
        rows, tail = self.direction(tokens), None
        if self.convolution is not None:
            tail = self.convolution.tail(token_mask.hide(rows), before)
            rows = token_mask.apply(self.convolution, rows, before)
        vectors = self.norm(at_least_float32(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2))
        beta = 2 * at_least_float32(token_mask.hide(self.beta(tokens).sigmoid())).mT
        return TokenReflections(vectors, beta, tail)
