"""Multi-head latent attention: keys and values of all heads are projected from one low-rank latent per position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from ..attention import Observation, attention, observe
from ..biases import Bias
from ..errors import ConfigurationError
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask, as_mask
from ..positions import Rotary, Rotation
from ..utils.numbers import whole_number
from .attention_layer import CachedAttention, CallKwargs, Heads, Store
from .feedforward import RMSNorm
from .input_checks import check_input, check_positions, probability
from .layer_arguments import BiasModule, check_cache
from .linear import Linear, dense_weight
from .projections import init_xavier


class LatentProjections(nn.Module):
    """c = norm(X W_DKV) of latent_dim, K_h = c W_UK and V_h = c W_UV for each head; and one shared K_R = X W_KR.

    Queries are Q_h = Y W_UQ and Q_R = Y W_QR, with Y = norm(X W_DQ) of query_latent_dim, or Y = X without one. Rotary
    embedding applies to K_R and Q_R, of rotary_dim. No map has an additive bias. Weights start Xavier uniform.

    Args:
        dim: of the input and of the output.
        num_heads: heads.
        latent_dim: of c.
        rotary_dim: of K_R, and of each head's Q_R.
        head_dim: of each K_h and Q_h; dim / num_heads without one.
        value_dim: of each V_h; head_dim without one.
        query_latent_dim: of the latent of the query; None projects queries from the input directly.
        norm: called with a dim, returns the norm module of a latent.

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
                init_xavier(module)

    def queries(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Q_h and Q_R: (batch, length, dim) to (batch, heads, length, head_dim) and (..., rotary_dim)."""
        check_input("query", inputs, self.dim, self)
        if self.query_down is not None:
            inputs = self.query_norm(self.query_down(inputs))
        heads = self.query(inputs).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        plain, rotary = heads.split([self.head_dim, self.rotary_dim], dim=-1)
        return plain, rotary

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

    def absorb_key_matrix(self, plain: Tensor) -> Tensor:
        """Q_h W_UKᵀ: queries (batch, heads, length, head_dim) to (batch, heads, length, latent_dim)."""
        return plain @ dense_weight(self.key).unflatten(0, (self.num_heads, -1))

    def expand_context(self, context: Tensor) -> Tensor:
        """Context of latents times W_UV: (batch, heads, length, latent_dim) to (batch, heads, length, value_dim)."""
        return context @ dense_weight(self.value).unflatten(0, (self.num_heads, -1)).mT

    def project_output(self, context: Tensor) -> Tensor:
        """Heads concatenated and projected: (batch, heads, length, value_dim) to (batch, length, dim)."""
        return self.output(context.transpose(1, 2).flatten(-2))


class LatentAttention(CachedAttention):
    """softmax( (Q_h · K_h + Q_R · K_R) / √(head_dim + rotary_dim) + B, where M ) · V_h, heads joined.

    The cache stores c and the rotated K_R: latent_dim + rotary_dim numbers per position, for any number of heads. A
    step attends to them directly: Q_h · K_h = (Q_h W_UKᵀ) · c, so W_UK is absorbed into the query and W_UV into the
    output. `forward` computes keys and values of all heads, which costs less for whole sequences; the results are
    equal. The cache has [c; K_R] as keys, and values of dim 0.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, heads and the linear maps.
        rotary: rotary position embedding of Q_R and K_R.
        mask: M, of every call.
        bias: B, of every call.
        dropout: probability of dropping a weight in training.

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
        self.bias = None if bias is None else BiasModule(bias)
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
        """Self-attention of a sequence; arguments and errors are those of `Attention.forward`."""
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options = self._sequence_inputs(query, call)
        return self.projections.project_output(attention(*heads, **options))

    def observe(self, query: Tensor, *lenses: Lens, **call: Unpack[CallKwargs]) -> Observation:
        """`forward` with lenses on its weights."""
        heads, options = self._sequence_inputs(query, call)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self.projections.project_output(seen.output))

    def _sequence_inputs(self, inputs: Tensor, call: CallKwargs) -> tuple[Heads, AttentionOptions]:
        """Arguments of `attention` for a whole sequence: keys and values of all heads."""
        positions = call.get("positions")
        plain, rotary = self.projections.queries(inputs)
        latent, key = self.projections.latents(inputs)
        if positions is not None:
            check_positions("positions", positions, inputs.shape[0], inputs.shape[1])
        rotary, key = self._rotated(positions, rotary, key, rotation=call.get("rotation"))
        keys, values = self.projections.keys_and_values(latent)
        shared = key.expand(-1, keys.shape[1], -1, -1)
        heads = torch.cat([plain, rotary], -1), torch.cat([keys, shared], -1), values
        return heads, self._options(call, positions, positions)

    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        """Arguments of `attention` for a step: latents as keys and values of one head, W_UK absorbed in the query."""
        check_cache(cache, self.mask)
        plain, rotary = self.projections.queries(query)
        latent, key = self.projections.latents(query)
        new = self._step_positions(query, cache, call)
        rotary, key = self._rotated(new, rotary, key, rotation=call.get("rotation"))
        stored = torch.cat([latent, key], -1)
        cache = cache.append(stored, stored[..., :0], call.get("positions"))
        at = (None, None) if cache.has_default_positions else (new, cache.positions)
        queries = torch.cat([self.projections.absorb_key_matrix(plain), rotary], -1)
        heads = queries, cache.keys, cache.keys[..., : self.projections.latent_dim]
        return heads, self._options(call, *at), cache

    def _step_output(self, context: Tensor, query: Tensor) -> Tensor:
        """The output from the context of latents, with W_UV absorbed."""
        return self.projections.project_output(self.projections.expand_context(context))

    def _options(
        self, call: CallKwargs, query_positions: Tensor | None, key_positions: Tensor | None
    ) -> AttentionOptions:
        return {**self._layer_options(call, query_positions, key_positions), "scale": self.scale}
