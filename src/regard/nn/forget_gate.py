"""The forget gate of an attention layer: a projection of each token to one gate per head, and its sums in a cache."""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ..biases.forget_gates import GateSums
from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from .caches import KeyValueStore

TERMS = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 4, torch.float16: 4}
"""As how many numbers of a dtype a sum is kept: enough for an error below that of a score in float32."""


class ForgetGate(nn.Module):
    """Gates f = σ(W x + b), one for each token and head, and the bias c_i - c_j of their logarithms' sums.

    A cache keeps the sums as further features of its keys, so that whatever evicts, reorders or moves keys takes their
    sums along.

    Shapes: tokens (batch, M, dim), sums (batch, heads, N) in float64.
    """

    def __init__(self, dim: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, heads)
        self.heads, self.key_heads = heads, key_heads

    def sums(self, tokens: Tensor) -> Tensor:
        """The sums c of some tokens, from the first of them on."""
        return logsigmoid(at_least_float32(self.projection(tokens))).mT.double().cumsum(-1)

    def bias(self, sums: Tensor, queries: int, dtype: torch.dtype) -> GateSums:
        """The bias of the last tokens, which are the queries, with the sums of all keys."""
        return GateSums(sums[..., sums.shape[-1] - queries :, None], sums[..., None], dtype == torch.float64)

    def with_sums(self, keys: Tensor, tokens: Tensor, cache: KeyValueStore) -> Tensor:
        """The keys of the next tokens with their sums as further features: (batch, key heads, M, ·)."""
        sums = self.sums(tokens)
        if not isinstance(cache, Sized):
            raise ConfigurationError(
                f"a forget gate goes on from the last key of the cache, and a {type(cache).__name__} has no length to "
                "say whether there is one: give it a __len__, or take layer.make_cache()"
            )
        if len(cache):
            _, before = self.split(cache.keys[:, :, -1:], keys.shape[-1])
            sums = sums + before
        terms, rest = [], sums
        for _ in range(TERMS[keys.dtype]):
            terms.append(rest.to(keys.dtype))
            rest = rest - terms[-1].double()
        features = torch.stack(terms, -1).unflatten(1, (self.key_heads, -1))  # [B, Hk, group, M, terms]
        return torch.cat([keys, features.transpose(2, 3).flatten(3)], -1)

    def split(self, keys: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Keys and sums of what `with_sums` returned."""
        features = keys[..., dim:].unflatten(-1, (self.heads // self.key_heads, -1))  # [B, Hk, N, group, terms]
        return keys[..., :dim], features.double().sum(-1).transpose(2, 3).flatten(1, 2)
