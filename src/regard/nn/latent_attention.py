"""Multi-head latent attention: keys and values of all heads from one short vector for each position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from ..attention import Seen, attention, observe
from ..biases import Bias
from ..errors import ConfigurationError
from ..kernels.validation import Options
from ..lenses import Lens
from ..masks import Mask, as_mask
from ..positions import Rotary, Rotation
from ..utils.numbers import whole_number
from .attention_layer import Beside, Heads
from .caches import KVCache
from .input_checks import check_input, check_positions, probability
from .layer_arguments import HeldBias, check_cache, joined_bias, joined_mask
from .linear import Linear
from .normalization import RMSNorm
from .projections import xavier


class LatentProjections(nn.Module):
    """c = norm(X W_DKV) of latent_dim, K_h = c W_UK and V_h = c W_UV for each head; and K_R = X W_KR for all of them.

    Queries are Q_h = Y W_UQ and Q_R = Y W_QR, with Y = norm(X W_DQ) of query_latent_dim, or Y = X without one. K_R
    and Q_R, of rotary_dim, are what a rotary turns. No map adds a bias. Weights start Xavier uniform.

    Args:
        dim: of the input and of the output.
        num_heads: heads.
        latent_dim: of c.
        rotary_dim: of K_R, and of each head's Q_R.
        head_dim: of each K_h and Q_h; dim / num_heads without one.
        value_dim: of each V_h; head_dim without one.
        query_latent_dim: of the query's own short vector; None for none.
        norm: makes the norm of a short vector from its dim.

    Raises:
        ConfigurationError: a number that is below 1, does not divide or is missing.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, Eqs. 9 to 19; the norms are those of section 3.1.2.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        rotary_dim: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        query_latent_dim: int | None = None,
        norm: Callable[[int], nn.Module] = RMSNorm,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        self.latent_dim, self.rotary_dim = (
            whole_number("latent_dim", latent_dim),
            whole_number("rotary_dim", rotary_dim),
        )
        if head_dim is None and dim % num_heads:
            raise ConfigurationError(
                f"dim is {dim} and num_heads {num_heads}: without head_dim each head takes dim / num_heads, so "
                "num_heads has to divide dim; or give head_dim"
            )
        self.head_dim = whole_number("head_dim", dim // num_heads if head_dim is None else head_dim)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim)
        source = dim if query_latent_dim is None else whole_number("query_latent_dim", query_latent_dim)
        self.query_down = None if query_latent_dim is None else Linear(dim, source, bias=False)
        self.query_norm = nn.Identity() if query_latent_dim is None else norm(source)
        self.query = Linear(source, num_heads * (self.head_dim + rotary_dim), bias=False)
        self.down = Linear(dim, latent_dim + rotary_dim, bias=False)
        self.norm = norm(latent_dim)
        self.key = Linear(latent_dim, num_heads * self.head_dim, bias=False)
        self.value = Linear(latent_dim, num_heads * self.value_dim, bias=False)
        self.output = Linear(num_heads * self.value_dim, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                xavier(module)

    def queries(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Q_h and Q_R: (batch, length, dim) to (batch, heads, length, head_dim) and (..., rotary_dim)."""
        check_input("query", inputs, self.dim, self)
        if self.query_down is not None:
            inputs = self.query_norm(self.query_down(inputs))
        heads = self.query(inputs).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        plain, turned = heads.split([self.head_dim, self.rotary_dim], dim=-1)
        return plain, turned

    def latents(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors c and K_R: (batch, length, dim) to (batch, 1, length, latent_dim) and (..., rotary_dim)."""
        latent, key = self.down(inputs).unsqueeze(1).split([self.latent_dim, self.rotary_dim], dim=-1)
        return self.norm(latent), key

    def keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """K_h and V_h: (batch, 1, length, latent_dim) to (batch, heads, length, ·)."""
        keys, values = (
            linear(latent.squeeze(1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.key, self.value)
        )
        return keys, values

    def absorbed(self, plain: Tensor) -> Tensor:
        """Q_h W_UKᵀ: queries (batch, heads, length, head_dim) as (batch, heads, length, latent_dim)."""
        return plain @ self.key.weight.unflatten(0, (self.num_heads, -1))

    def released(self, context: Tensor) -> Tensor:
        """Context over latents, (batch, heads, length, latent_dim), to (batch, heads, length, value_dim)."""
        return context @ self.value.weight.unflatten(0, (self.num_heads, -1)).mT

    def joined(self, context: Tensor) -> Tensor:
        """(batch, heads, length, value_dim) to (batch, length, dim)."""
        return self.output(context.transpose(1, 2).flatten(-2))


class LatentAttention(nn.Module):
    """softmax( (Q_h · K_h + Q_R · K_R) / √(head_dim + rotary_dim) + B, where M ) · V_h, heads joined.

    A cache keeps c and the turned K_R alone, latent_dim + rotary_dim numbers for each position, whatever the number of
    heads. A step attends to them as they are: Q_h · K_h = (Q_h W_UKᵀ) · c, so the query takes in the key's matrix and
    the output the value's. `forward` makes keys and values of all heads, which costs less for whole sequences; both
    are equal.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims and heads, and the linear maps.
        rotary: turns Q_R and K_R.
        mask: M, of every call.
        bias: B, of every call.
        dropout: the probability with which a weight is dropped in training.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C.

    >>> import torch, regard
    >>> from regard.nn import LatentAttention, LatentProjections
    >>> projections = LatentProjections(16, num_heads=4, latent_dim=6, rotary_dim=2)
    >>> layer = LatentAttention(projections, regard.positions.Rotary(2), mask=regard.masks.causal())
    >>> x = torch.randn(1, 5, 16)
    >>> output, cache = layer.step(x, layer.make_cache())
    >>> torch.allclose(output, layer(x), atol=1e-6), cache.keys.shape
    (True, torch.Size([1, 1, 5, 8]))
    """

    def __init__(
        self,
        projections: LatentProjections,
        rotary: Rotary,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if rotary.dim > projections.rotary_dim:
            raise ConfigurationError(
                f"rotary turns {rotary.dim} features, but the projections have rotary_dim={projections.rotary_dim}: "
                f"give Rotary a dim of {projections.rotary_dim} or less"
            )
        self.projections = projections
        self.rotary = rotary
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else HeldBias(bias)
        self.dropout = probability("dropout", dropout)
        self.scale = (projections.head_dim + projections.rotary_dim) ** -0.5

    def forward(
        self,
        query: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """The attention of a sequence to itself; arguments and errors are those of `Attention.forward`."""
        beside: Beside = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options = self._whole(query, beside)
        return self.projections.joined(attention(*heads, **options))

    def observe(self, query: Tensor, *lenses: Lens, **beside: Unpack[Beside]) -> Seen:
        """`forward`, and what lenses show of its weights."""
        heads, options = self._whole(query, beside)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self.projections.joined(seen.output))

    def make_cache(self, max_length: int | None = None) -> KVCache:
        """An empty cache for decoding; see `Attention.make_cache`. Its keys are c and K_R, its values have no dims."""
        return KVCache() if self.mask is None else KVCache.rolling(self.mask, max_length)

    def step(
        self,
        query: Tensor,
        cache: KVCache,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, KVCache]:
        """The tokens that come next, and the cache with them in it; arguments and errors as of `Attention.step`."""
        beside: Beside = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options, cache = self._next(query, cache, beside)
        return self._released(attention(*heads, **options)), cache.trimmed()

    def observe_step(
        self, query: Tensor, cache: KVCache, *lenses: Lens, **beside: Unpack[Beside]
    ) -> tuple[Seen, KVCache]:
        """`step`, and what lenses show of its weights; their columns are the keys that the cache has kept."""
        heads, options, cache = self._next(query, cache, beside)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self._released(seen.output)), cache.trimmed()

    def _whole(self, inputs: Tensor, beside: Beside) -> tuple[Heads, Options]:
        """Keys and values of all heads, from a whole sequence."""
        positions = beside.get("positions")
        plain, turned = self.projections.queries(inputs)
        latent, key = self.projections.latents(inputs)
        at = torch.arange(inputs.shape[1], device=inputs.device) if positions is None else positions
        check_positions("positions", at, inputs.shape[0], inputs.shape[1])
        turned, key = self._turned(at, turned, key, rotation=beside.get("rotation"))
        keys, values = self.projections.keys_and_values(latent)
        shared = key.expand(-1, keys.shape[1], -1, -1)
        heads = torch.cat([plain, turned], -1), torch.cat([keys, shared], -1), values
        return heads, self._options(beside, positions, positions)

    def _next(self, inputs: Tensor, cache: KVCache, beside: Beside) -> tuple[Heads, Options, KVCache]:
        """The latents of a cache as the keys and values of one head, for queries that have taken in W_UK."""
        check_cache(cache, self.mask)
        plain, turned = self.projections.queries(inputs)
        latent, key = self.projections.latents(inputs)
        positions = beside.get("positions")
        at = cache.following(inputs.shape[1], inputs.device) if positions is None else positions
        check_positions("positions", at, inputs.shape[0], inputs.shape[1])
        turned, key = self._turned(at, turned, key, rotation=beside.get("rotation"))
        kept = torch.cat([latent, key], -1)
        cache = cache.append(kept, kept[..., :0], positions)
        places = (None, None) if cache.counted else (at, cache.positions)
        queries = torch.cat([self.projections.absorbed(plain), turned], -1)
        heads = queries, cache.keys, cache.keys[..., : self.projections.latent_dim]
        return heads, self._options(beside, *places), cache

    def _turned(self, positions: Tensor, *heads: Tensor, rotation: Rotation | None) -> tuple[Tensor, ...]:
        if rotation is None:
            dtype = torch.float64 if heads[0].dtype == torch.float64 else torch.float32
            rotation = self.rotary.rotation(positions, dtype=dtype)
        return tuple(rotation.turn(tensor) for tensor in heads)

    def _released(self, context: Tensor) -> Tensor:
        return self.projections.joined(self.projections.released(context))

    def _options(self, beside: Beside, query_positions: Tensor | None, key_positions: Tensor | None) -> Options:
        return {
            "mask": joined_mask(self.mask, beside.get("mask")),
            "bias": joined_bias(self.bias, beside.get("bias")),
            "scale": self.scale,
            "dropout_p": self.dropout if self.training else 0.0,
            "query_positions": query_positions,
            "key_positions": key_positions,
        }
