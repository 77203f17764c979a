"""Layers of differential attention, in both versions of the paper's authors."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..biases import Bias
from ..differential import DifferentialObservation, Pair, differential_attention, observe_differential_attention
from ..errors import ConfigurationError
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask
from ..positions import Rotary
from .attention_layer import CallKwargs, Store
from .caches import KVCache
from .caches.base import attended_positions
from .feedforward import RMSNorm
from .layer_arguments import check_cache
from .linear import Linear
from .projections import Projections, init_xavier
from .self_attention_layer import SelfAttentionLayer

Heads = tuple[Pair, Pair, Tensor]
"""Queries and keys of both softmaxes, and values."""


class DifferentialLayer(SelfAttentionLayer[Heads, DifferentialObservation, Store]):
    """Base class of the layers of differential attention: a subclass pairs heads and has λ."""

    def __init__(
        self,
        projections: Projections,
        mask: Mask | None,
        bias: Bias | Tensor | None,
        rotary: Rotary | None,
    ) -> None:
        if projections.num_heads % 2 or projections.memory_dim is not None:
            raise ConfigurationError(
                f"projections have {projections.num_heads} heads and memory_dim={projections.memory_dim}; differential "
                "attention needs an even number of heads, one for either softmax, of one sequence"
            )
        super().__init__(projections, mask, bias, rotary)

    def make_cache(self, max_length: int | None = None) -> KVCache:
        """An empty cache for decoding, as `Attention.make_cache`."""
        return KVCache() if self.mask is None else KVCache.rolling(self.mask, max_length)

    def _heads(self, query: Tensor, call: CallKwargs, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        return self._paired(queries, *self._stored(keys, values))

    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        check_cache(cache, self.mask)
        new = self._new_positions(query, cache, call)
        queries, keys, values = self._projected(query, new, call.get("rotation"))
        cache = cache.append(*self._stored(keys, values), call.get("positions"))
        at = attended_positions(cache, new)
        return self._paired(queries, cache.keys, cache.values), self._options(call, *at), cache

    def _attend(self, query: Tensor, heads: Heads, options: AttentionOptions) -> Tensor:
        return self._output(differential_attention(*heads, self._share(query), **options))

    def _observe(
        self, query: Tensor, heads: Heads, options: AttentionOptions, lenses: Sequence[Lens]
    ) -> DifferentialObservation:
        seen = observe_differential_attention(*heads, self._share(query), *lenses, **options)
        return replace(seen, output=self._output(seen.output))

    @abstractmethod
    def _stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the projections as a cache stores them."""

    @abstractmethod
    def _paired(self, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        """Queries and keys of both softmaxes, and values, from queries and what is stored."""

    @abstractmethod
    def _share(self, query: Tensor) -> Tensor:
        """λ, from the tokens of the queries."""

    @abstractmethod
    def _output(self, context: Tensor) -> Tensor:
        """The layer's output, from what the heads read."""


class DifferentialAttention(DifferentialLayer):
    """(1 - λ₀) norm((softmax(Q₁ K₁ᵀ) - λ softmax(Q₂ K₂ᵀ)) V), heads joined and projected: version 1.

    λ = exp(λ_q1 · λ_k1) - exp(λ_q2 · λ_k2) + λ₀, one number for all heads, and λ₀ = 0.8 - 0.6 exp(-0.3 depth). The norm
    is over the 2 D numbers of each head by itself.

    Of the projections' 2 H heads of queries and 2 Hk of keys, the first half is that of the first softmax, and head h
    is a pair with head H + h; values of heads g and Hk + g are joined to one of 2 D numbers. A cache stores pairs.
    Checkpoints of `DiffLlama` have this order; where two heads of a pair are neighbours, as in the authors' code,
    reorder the rows of the matrices.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, an even number of heads and of key heads, and the linear maps.
        depth: the number of the layer in its model, from 0.
        mask: M, of every call.
        bias: B, of every call, the same for both softmaxes: of H heads.
        rotary: rotary position embedding.
        norm: called with 2 D, returns the norm of a head.

    Raises:
        ConfigurationError: an odd number of heads; values of another dim than keys.

    Source: Ye et al. 2024 (arXiv 2410.05258), section 2; as `DiffLlamaAttention` of transformers, whose norm has no
    weight: norm=lambda dim: torch.nn.RMSNorm(dim, eps, elementwise_affine=False). It has no dropout of weights, of
    which the paper says nothing.

    >>> import torch, regard
    >>> from regard.nn import DifferentialAttention, Projections
    >>> layer = DifferentialAttention(Projections(32, num_heads=4), depth=0, mask=regard.masks.causal())
    >>> x = torch.randn(2, 7, 32)
    >>> output, cache = layer.step(x, layer.make_cache())
    >>> torch.allclose(output, layer(x), atol=1e-5), cache.keys.shape
    (True, torch.Size([2, 2, 7, 16]))
    """

    def __init__(
        self,
        projections: Projections,
        depth: int,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        rotary: Rotary | None = None,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(projections, mask, bias, rotary)
        if projections.num_kv_heads % 2 or projections.value_dim != projections.head_dim:
            raise ConfigurationError(
                f"projections have {projections.num_kv_heads} key heads, value_dim={projections.value_dim} and "
                f"head_dim={projections.head_dim}; version 1 needs an even number of key heads, and values as wide as "
                "keys, which are joined in pairs"
            )
        dim = projections.head_dim
        self.initial_share = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(dim)) for _ in range(4)
        )
        self.norm = RMSNorm(2 * dim, 1e-5) if norm is None else norm(2 * dim)

    def _stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return _side_by_side(keys), _side_by_side(values)

    def _paired(self, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        dim = self.projections.head_dim
        first, second = queries.chunk(2, 1)
        return (first, second), (keys[..., :dim], keys[..., dim:]), values

    def _share(self, query: Tensor) -> Tensor:
        first = (self.lambda_q1 * self.lambda_k1).sum(dtype=torch.promote_types(query.dtype, torch.float32)).exp()
        second = (self.lambda_q2 * self.lambda_k2).sum(dtype=first.dtype).exp()
        return first - second + self.initial_share

    def _output(self, context: Tensor) -> Tensor:
        normed = (1.0 - self.initial_share) * self.norm(context)
        return self.projections.project_output(normed.to(context.dtype))

    def extra_repr(self) -> str:
        return f"initial_share={self.initial_share:.3f}, mask={self.mask!r}"


class DifferentialAttentionV2(DifferentialLayer):
    """(softmax(Q₁ Kᵀ) - σ(λ) softmax(Q₂ Kᵀ)) V, heads joined and projected: version 2, with λ = X W_λ of each token.

    Two neighbouring heads of the projections' 2 H are a pair, and read the same keys and values; so a step reads a
    cache of Hk heads, as without differences. There is no norm of heads.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, 2 H heads of queries, and the linear maps; `projections.output` is replaced by one of H.
        mask: M, of every call.
        bias: B, of every call, the same for both softmaxes: of H heads.
        rotary: rotary position embedding.

    Raises:
        ConfigurationError: an odd number of heads in a group.

    Source: Ye et al. 2026, "Differential Transformer V2", and the authors' code, multihead_flashdiffv2.py.

    >>> import torch, regard
    >>> from regard.nn import DifferentialAttentionV2, Projections
    >>> layer = DifferentialAttentionV2(Projections(32, num_heads=8, num_kv_heads=2, head_dim=8))
    >>> layer(torch.randn(2, 7, 32)).shape, layer.projections.output.in_features
    (torch.Size([2, 7, 32]), 32)
    """

    def __init__(
        self,
        projections: Projections,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__(projections, mask, bias, rotary)
        heads = projections.num_heads // 2
        if heads % projections.num_kv_heads:
            raise ConfigurationError(
                f"projections have {projections.num_heads} heads and {projections.num_kv_heads} key heads; version 2 "
                "needs an even number of heads for each key head, as both of a pair read the same keys"
            )
        output = projections.output
        projections.output = Linear(heads * projections.value_dim, projections.dim, output.bias is not None)
        self.share = Linear(projections.dim, heads, False)
        init_xavier(projections.output)
        init_xavier(self.share)

    def _stored(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    def _paired(self, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        return (queries[:, 0::2], queries[:, 1::2]), (keys, keys), values

    def _share(self, query: Tensor) -> Tensor:
        return self.share(query).mT.sigmoid()

    def _output(self, context: Tensor) -> Tensor:
        return self.projections.project_output(context)

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"


def _side_by_side(heads: Tensor) -> Tensor:
    """(batch, 2 Hk, N, D) to (batch, Hk, N, 2 D): head g beside head Hk + g."""
    return torch.cat(heads.chunk(2, 1), -1)
