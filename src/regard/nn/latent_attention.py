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
from ..masks import Mask, as_mask, chosen, where, window
from ..positions import Rotary, Rotation
from ..utils.numbers import whole_number
from .attention_layer import CachedAttention, CallKwargs, Heads, Store
from .caches.base import attended_positions
from .feedforward import RMSNorm
from .input_checks import check_input, check_positions, probability
from .key_selection import KeySelection
from .layer_arguments import BiasModule, check_cache, check_no_selection
from .lightning_indexer import EarlierIndexer, LightningIndexer
from .linear import Linear, dense_weight
from .projections import init_xavier


class LatentProjections(nn.Module):
    """c = norm(X W_DKV) of latent_dim, K_h = c W_UK and V_h = c W_UV for each head; and one shared K_R = X W_KR.

    Queries are Q_h = Y W_UQ and Q_R = Y W_QR, with Y = norm(X W_DQ) of query_latent_dim, or Y = X without one. Rotary
    embedding applies to K_R and Q_R, of rotary_dim. Weights start Xavier uniform, additive biases at 0.

    Args:
        dim: of the input and of the output.
        num_heads: heads.
        latent_dim: of c.
        rotary_dim: of K_R, and of each head's Q_R.
        head_dim: of each K_h and Q_h; dim / num_heads without one.
        value_dim: of each V_h; head_dim without one.
        query_latent_dim: of the latent of the query; None projects queries from the input directly.
        norm: called with a dim, returns the norm module of a latent.
        bias: whether the maps into latents (W_DQ, W_DKV and W_KR) and that of the output add one.

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
        bias: bool = False,
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
        self.query_down = None if query_latent_dim is None else Linear(dim, source, bias)
        self.query_norm = nn.Identity() if query_latent_dim is None else norm(source)
        self.query = Linear(source, num_heads * (self.head_dim + rotary_dim), bias=False)
        self.down = Linear(dim, latent_dim + rotary_dim, bias)
        self.norm = norm(latent_dim)
        self.key = Linear(latent_dim, num_heads * self.head_dim, bias=False)
        self.value = Linear(latent_dim, num_heads * self.value_dim, bias=False)
        self.output = Linear(num_heads * self.value_dim, dim, bias)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                init_xavier(module)

    def queries(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Q_h and Q_R: (batch, length, dim) to (batch, heads, length, head_dim) and (..., rotary_dim)."""
        return self.queries_of(self.query_latent(inputs))

    def query_latent(self, inputs: Tensor) -> Tensor:
        """Y: (batch, length, dim) to (batch, length, query_latent_dim); the input itself without one."""
        check_input("query", inputs, self.dim, self)
        return inputs if self.query_down is None else self.query_norm(self.query_down(inputs))

    def queries_of(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Q_h and Q_R of Y."""
        heads = self.query(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
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
    """softmax( s · (Q_h · K_h + Q_R · K_R) + B, where M ) · V_h, heads joined; s = 1/√(head_dim + rotary_dim).

    The cache stores c and the rotated K_R: latent_dim + rotary_dim numbers per position, for any number of heads. A
    step attends to them directly: Q_h · K_h = (Q_h W_UKᵀ) · c, so W_UK is absorbed into the query and W_UV into the
    output. `forward` computes keys and values of all heads, which costs less for whole sequences; the results are
    equal. The cache has [c; K_R] as keys, and values of dim 0; with an indexer, the indexer's keys as values.

    With an indexer, each token attends to the keys alone that the indexer chooses for it, of those that M allows: the
    sparse attention of DeepSeek-V3.2. Chosen keys are gathered, in time proportional to them. Layers with an
    `EarlierIndexer` attend to those that an earlier layer has chosen.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, heads and the linear maps.
        rotary: rotary position embedding of Q_R and K_R; None leaves these as they are.
        scale: s, instead of 1/√(head_dim + rotary_dim). DeepSeek's checkpoints with YaRN multiply that by the square of
            `regard.positions.yarn_attention_factor(factor, mscale_all_dim)`.
        indexer: chooses the keys of each token.
        mask: M, of every call.
        bias: B, of every call; none with an indexer.
        dropout: probability of dropping a weight in training.

    Raises:
        ConfigurationError: a rotary of more features than there are; a scale that is not above 0; an indexer with a
            bias, or for latents of another dim.

    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1 and appendix C; the indexer is of DeepSeek-V3.2-Exp (2025).

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
        rotary: Rotary | None,
        *,
        scale: float | None = None,
        indexer: LightningIndexer | EarlierIndexer | None = None,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if rotary is not None and rotary.dim > projections.rotary_dim:
            raise ConfigurationError(
                f"rotary turns {rotary.dim} features, but the projections have rotary_dim={projections.rotary_dim}: "
                f"give Rotary a dim of {projections.rotary_dim} or less"
            )
        if scale is not None and not 0 < scale < float("inf"):
            raise ConfigurationError(f"scale is {scale!r}; it needs a finite number above 0, or None for 1/√dim")
        if indexer is not None:
            indexer.check_layer(projections.query.in_features, rotary)
        self.projections = projections
        self.rotary = rotary
        self.indexer = indexer
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else BiasModule(bias)
        self.dropout = probability("dropout", dropout)
        self.scale = (projections.head_dim + projections.rotary_dim) ** -0.5 if scale is None else scale
        self._check_no_bias(bias)

    def forward(
        self,
        query: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
        selection: KeySelection | None = None,
    ) -> Tensor:
        """Self-attention of a sequence; arguments and errors are those of `Attention.forward`.

        Layers with an indexer write the keys that it chooses into a `selection`, those with an `EarlierIndexer` read
        them there.
        """
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        if selection is not None:
            call["selection"] = selection
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
        source = self.projections.query_latent(inputs)
        plain, rotary = self.projections.queries_of(source)
        latent, key = self.projections.latents(inputs)
        if positions is not None:
            check_positions("positions", positions, inputs.shape[0], inputs.shape[1])
        rotation = self._rotation(positions, key, call.get("rotation"))
        rotary, key = _turned(rotation, rotary, key)
        keys, values = self.projections.keys_and_values(latent)
        shared = key.expand(-1, keys.shape[1], -1, -1)
        heads = torch.cat([plain, rotary], -1), torch.cat([keys, shared], -1), values
        options = self._options(call, positions, positions)
        if self.indexer is not None:
            index_keys = self.indexer.keys(inputs, rotation)
            options = self._of_chosen(self.indexer, inputs, source, index_keys, rotation, options, call)
        return heads, options

    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        """Arguments of `attention` for a step: latents as keys and values of one head, W_UK absorbed in the query."""
        check_cache(cache, self.mask)
        source = self.projections.query_latent(query)
        plain, rotary = self.projections.queries_of(source)
        latent, key = self.projections.latents(query)
        new = self._step_positions(query, cache, call)
        rotation = self._rotation(new, key, call.get("rotation"))
        rotary, key = _turned(rotation, rotary, key)
        stored = torch.cat([latent, key], -1)
        beside = stored[..., :0] if self.indexer is None else self.indexer.keys(query, rotation)
        cache = cache.append(stored, beside, call.get("positions"))
        at = attended_positions(cache, new)
        queries = torch.cat([self.projections.absorb_key_matrix(plain), rotary], -1)
        heads = queries, cache.keys, cache.keys[..., : self.projections.latent_dim]
        options = self._options(call, *at)
        if self.indexer is not None:
            options = self._of_chosen(self.indexer, query, source, cache.values, rotation, options, call)
        return heads, options, cache

    def _step_output(self, context: Tensor, query: Tensor) -> Tensor:
        """The output from the context of latents, with W_UV absorbed."""
        return self.projections.project_output(self.projections.expand_context(context))

    def _options(
        self, call: CallKwargs, query_positions: Tensor | None, key_positions: Tensor | range | None
    ) -> AttentionOptions:
        self._check_no_bias(call.get("bias"))
        if self.indexer is None:
            check_no_selection(call.get("selection"))
        return {**self._layer_options(call, query_positions, key_positions), "scale": self.scale}

    @staticmethod
    def _of_chosen(
        indexer: LightningIndexer | EarlierIndexer,
        inputs: Tensor,
        source: Tensor,
        keys: Tensor,
        rotation: Rotation | None,
        options: AttentionOptions,
        call: CallKwargs,
    ) -> AttentionOptions:
        """The options of attention to the keys that the indexer chooses of those that the mask allows.

        Chosen keys are numbers of columns, which are positions where none are given; the mask has been applied then.
        """
        mask = options.get("mask")
        if not isinstance(mask, Mask):
            mask = window() if mask is None else where(keep=mask)
        found = indexer(
            inputs,
            source,
            keys,
            rotation,
            mask=mask,
            query_positions=options.get("query_positions"),
            key_positions=options.get("key_positions"),
            selection=call.get("selection"),
        )
        return {**options, "mask": chosen(found.unsqueeze(1)), "query_positions": None, "key_positions": None}

    def _check_no_bias(self, bias: Bias | Tensor | None) -> None:
        if self.indexer is not None and bias is not None:
            raise ConfigurationError(
                "a bias was given to a layer whose indexer chooses keys, which has none: leave bias or indexer out"
            )


def _turned(rotation: Rotation | None, *heads: Tensor) -> tuple[Tensor, ...]:
    """Heads rotated, or as they are without a rotation."""
    return heads if rotation is None else tuple(rotation.rotate(tensor) for tensor in heads)
