"""The layer of linear attention: projections around `regard.linear_attention`, with gates and a convolution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..attention import Observation
from ..biases import Bias
from ..errors import ConfigurationError, ShapeError
from ..kernels.hooks import refuse_convolutions
from ..lenses import Lens
from ..linear import Decay, FeatureMap, UpdateRule, observe_linear_attention
from ..linear.delta_product import attend_by_steps
from ..linear.linear_arguments import LinearOptions, checked_map
from ..linear.linear_mask import mask_at_positions
from ..linear.update_rules import RuleTokens
from ..masks import Mask
from ..positions import Rotary, Rotation
from .caches import LinearCache
from .grouped_values import split_heads
from .input_checks import check_input, check_positions, refuse_scripting
from .layer_arguments import check_no_rotation, check_parts_of_layer, checked_rotary
from .learned_gates import LearnedGates, check_kinds
from .linear_attention_flags import decay_of_flag, rule_of_flags
from .output_gate import OutputGate
from .projections import Projections
from .short_convolution import ShortConvolution
from .token_mask import ALL_TOKENS, TokenMask
from .token_shift import MixedTokens, TokenShift


class LinearInputs(NamedTuple):
    """What a layer passes to `regard.linear_attention`, and what its output is made of besides.

    heads: queries, keys and the values that are written. gate: the tokens that the output gate reads. tail, last: of
    the convolution and the shift, for the tokens that follow.
    """

    heads: tuple[Tensor, Tensor, Tensor]
    options: LinearOptions
    tokens: RuleTokens
    gate: Tensor
    tail: Tensor | None
    last: Tensor | None


class LinearAttention(LearnedGates):
    """concat_h( Σ_j w_ij V_j / Σ_j w_ij ) W_o with w_ij = φ(Q_i) · φ(K_j): linear in the length, with decay and gates.

    Self-attention in time and memory linear in the length; causal, it decodes with a state of constant size. Not
    causal, it also attends to a memory, another sequence.

    Shapes: query (batch, M, dim), memory (batch, N, memory_dim), output (batch, M, dim).

    Args:
        projections: dims, heads and the linear maps.
        feature_map: φ, from `regard.linear`; `Elu()` by default, `UnitNorm(Identity())` for the delta rule.
        causal: whether a token attends to itself and those before it alone.
        decay: of a causal layer, what the state is multiplied by before each token, from `regard.linear`:
            `FixedDecay(logarithms)` as in RetNet; `HeadDecay()`, learned, or `FeatureDecay()`, learned for each feature
            as in gated linear attention; `SoftplusDecay()` of Mamba-2 and Gated DeltaNet, `SoftplusFeatureDecay()` of
            Kimi Linear, `SigmoidFeatureDecay()` of RWKV-7; none by default.
        rule: how a value is written into the state, from `regard.linear`: `SumRule()` by default,
            `SumRule(normalize=False)` for weights that are not divided by their sum; of a causal layer `DeltaRule()`,
            with a decay the gated delta rule, `DecoupledDeltaRule()`, `BonusRule()`, `StateSpaceRule()`,
            `GeneralizedDeltaRule()` of RWKV-7.
        rotary: rotary position embedding of queries and keys, before φ. Weights depend on relative positions alone
            where φ is `Identity()`.
        convolution: of a causal layer, a `ShortConvolution` of what is projected, before heads are normed and rotated.
        shift: of a causal layer, a `TokenShift` of what all its maps read.
        gate: an `OutputGate`, or `GatedGroupNorm`, of what queries read, before the output projection.
        delta_rule: in earlier versions what `rule` is; read for one version, with a warning, as are the decays "head",
            "feature" and a tensor.
        normalize: likewise.

    Raises:
        ConfigurationError: a decay or the delta rule in a layer that is not causal, or another argument that does not
            fit.
        ShapeError: a fixed decay that has not one number for each key head.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236); gates Yang et al. 2024 (arXiv 2312.06635), section 4.4, the
    delta rule Yang et al. 2024 (arXiv 2406.06484), section 3.3; the parts have their own.

    >>> import torch, regard
    >>> layer = regard.nn.LinearAttention(regard.nn.Projections(16, num_heads=4, num_kv_heads=2), causal=True).eval()
    >>> x, cache = torch.randn(2, 7, 16), layer.make_cache()
    >>> outputs = []
    >>> with torch.no_grad():
    ...     for token in x.split(1, dim=1):
    ...         output, cache = layer.step(token, cache)
    ...         outputs.append(output)
    >>> torch.allclose(torch.cat(outputs, 1), layer(x), atol=1e-6)
    True

    Gated DeltaNet is a configuration of it:

    >>> from regard.nn import L2Norm, LinearAttention, OutputGate, Projections, RMSNorm, ShortConvolution
    >>> projections = Projections(16, num_heads=2, bias=False, norm=L2Norm)
    >>> gated_delta_net = LinearAttention(
    ...     projections,
    ...     feature_map=regard.linear.Identity(),
    ...     causal=True,
    ...     decay=regard.linear.SoftplusDecay(),
    ...     rule=regard.linear.DeltaRule(),
    ...     convolution=ShortConvolution(projections),
    ...     gate=OutputGate(projections, norm=RMSNorm),
    ... )
    >>> gated_delta_net(x).shape
    torch.Size([2, 7, 16])
    """

    def __init__(
        self,
        projections: Projections,
        *,
        feature_map: FeatureMap | None = None,
        causal: bool = False,
        decay: Decay | Tensor | str | None = None,
        rule: UpdateRule | None = None,
        rotary: Rotary | None = None,
        convolution: ShortConvolution | None = None,
        shift: TokenShift | None = None,
        gate: OutputGate | None = None,
        delta_rule: bool | None = None,
        normalize: bool | None = None,
    ) -> None:
        decay, rule = decay_of_flag(decay), rule_of_flags(rule, delta_rule, normalize)
        check_parts_of_layer(projections, gate)
        check_kinds(decay, rule)
        ordered = {"rule": rule if rule.needs_order else None, "convolution": convolution, "shift": shift}
        _check_order(causal, decay=decay, **ordered)
        if causal and projections.memory_dim is not None:
            raise ConfigurationError(
                "a causal layer attends to its own sequence alone, but the projections have memory_dim="
                f"{projections.memory_dim}: make them without it, or the layer with causal=False"
            )
        phi = checked_map(rule.default_map if feature_map is None else feature_map)
        super().__init__(projections, phi, decay, rule)
        self.causal = causal
        self.rotary = checked_rotary(rotary, projections.head_dim)
        self.convolution, self.shift, self.gate = convolution, shift, gate

    @property
    def feature_map(self) -> FeatureMap:
        """φ of queries and keys."""
        return self._feature_map

    @property
    def normalize(self) -> bool:
        """Whether weights are divided by their sum."""
        return self.rule.normalize

    def forward(
        self,
        query: Tensor,
        memory: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Self-attention of a sequence, or attention to a memory by a layer that is not causal.

        Args:
            query: (batch, M, dim), source of the queries; without a memory also of keys and values.
            memory: (batch, N, memory_dim), source of keys and values.
            mask: padding and documents, and for self-attention causal, as `regard.linear_attention` takes them.
            bias: None: weights that are sums of features have none.
            positions: of the query's tokens, integers (M,) or (batch, M), for the mask and the rotary embedding;
                0..M-1 by default. In a causal layer they increase within each document.
            rotation: result of `rotary.rotation(positions)`, for layers that share it.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit.
            MaskError: a mask that linear attention cannot take.
            ConfigurationError: a bias; a memory for a causal layer.
        """
        inputs = self._sequence_inputs(query, memory, mask=mask, bias=bias, positions=positions, rotation=rotation)
        return self._output(attend_by_steps(*inputs.heads, **inputs.options), inputs)

    def make_cache(self, max_length: int | None = None) -> LinearCache:
        """An empty cache for decoding; its size depends on no `max_length`.

        Raises:
            ConfigurationError: a layer that is not causal.
        """
        if not self.causal:
            raise ConfigurationError(
                "a layer that is not causal cannot decode token by token, as each attends to those that follow: make "
                "it with causal=True"
            )
        return LinearCache(self.feature_map, self.normalize)

    def step(
        self,
        query: Tensor,
        cache: LinearCache,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, LinearCache]:
        """One decoding step: attention of the next M tokens to themselves and all before, and the extended cache.

        Steps of any size equal `forward` on the whole sequence.

        Args:
            query: (batch, M, dim), the next M tokens.
            cache: returned by the previous step; first from `make_cache()`.
            mask: padding among the M tokens, which the state then leaves out; columns of a tensor are these tokens.
            bias: None.
            positions: of the M tokens, (M,) or (batch, M); by default those that follow the cache's.
            rotation: of the M tokens, as in `forward`.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit the layer, or the cache.
            ConfigurationError: a cache of another kind, a bias.
            MaskError: a mask that linear attention cannot take; documents.
        """
        _refuse_bias(bias)
        if not isinstance(cache, LinearCache) or not self.causal:
            raise ConfigurationError(
                f"step needs a LinearCache, as the make_cache() of a causal layer returns; it got a "
                f"{type(cache).__name__}" + ("" if self.causal else ", and the layer is not causal")
            )
        new = positions
        if positions is not None or mask is not None or self.rotary is not None:
            new = cache.next_positions(query.shape[1], query.device) if positions is None else positions
            check_positions("positions", new, query.shape[0], query.shape[1])
        own = None if new is None else mask_at_positions(mask, new, causal=True)
        inputs = self._inputs(query, query, new, rotation, own, cache)
        inputs.options["mask"] = own
        carried = {"tail": inputs.tail, "last": inputs.last}
        context, cache = cache.attend(*inputs.heads, positions, **carried, **inputs.options)
        return self._output(context, inputs), cache

    def observe(self, query: Tensor, *lenses: Lens, memory: Tensor | None = None, **call: Any) -> Observation:
        """`forward` with lenses from `regard.lenses` on its weights: `seen.output`, `seen[lens]`.

        Raises:
            ConfigurationError: weights that may be negative, or do not sum to 1, as those of the delta rule; a rule of
                several steps a token.

        >>> import torch, regard
        >>> received = regard.lenses.Received()
        >>> layer = regard.nn.LinearAttention(regard.nn.Projections(8, num_heads=2), causal=True)
        >>> layer.observe(torch.zeros(1, 3, 8), received)[received].detach()
        tensor([[[1.8333, 0.8333, 0.3333],
                 [1.8333, 0.8333, 0.3333]]])
        """
        if self.rule.steps > 1:
            raise ConfigurationError(
                f"a token of rule={self.rule!r} takes {self.rule.steps} steps, so that no pair of tokens has one "
                "weight for lenses to read: call forward"
            )
        inputs = self._sequence_inputs(query, memory, **call)
        seen = observe_linear_attention(*inputs.heads, *lenses, **inputs.options)
        return replace(seen, output=self._output(seen.output, inputs))

    def observe_step(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, as a step has the sums of earlier keys alone.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "a decoding step of linear attention has the sums of earlier keys, and no longer the weight of each: call "
            "observe on the whole sequence"
        )

    def _sequence_inputs(
        self,
        query: Tensor,
        memory: Tensor | None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> LinearInputs:
        """Arguments of `regard.linear_attention` for a whole sequence."""
        _refuse_bias(bias)
        source = query if memory is None else memory
        if memory is None:
            if self.projections.memory_dim is not None:
                raise ShapeError(
                    f"forward needs a memory: the projections have memory_dim={self.projections.memory_dim}. Call "
                    "forward(query, memory)"
                )
            if positions is not None:
                check_positions("positions", positions, query.shape[0], query.shape[1])
                mask = mask_at_positions(mask, positions, self.causal)
        elif self.causal:
            raise ConfigurationError("a causal layer attends to its own sequence alone: make it with causal=False")
        inputs = self._inputs(query, source, positions, rotation, mask)
        inputs.options.update(feature_map=self.feature_map, normalize=self.normalize, causal=self.causal, mask=mask)
        return inputs

    def _inputs(
        self,
        query: Tensor,
        source: Tensor,
        positions: Tensor | None,
        rotation: Rotation | None,
        mask: Mask | Tensor | None,
        cache: LinearCache | None = None,
    ) -> LinearInputs:
        """Queries, keys and written values of all heads, and the gates of the source's tokens; cache: before them."""
        token_mask = ALL_TOKENS
        if self.convolution is not None or self.shift is not None:
            refuse_convolutions()
            check_input("query", query, self.projections.dim, self)
            token_mask = TokenMask.from_mask(mask, query)
        mixed, last = self._mixed(query, source, token_mask, None if cache is None else cache.last)
        (queries, keys, values), tail = self._heads(mixed, token_mask, None if cache is None else cache.tail)
        if self.rotary is None:
            check_no_rotation(rotation)
        else:
            rotation = self._rotation(query, positions) if rotation is None else rotation
            queries = rotation.rotate(queries)
            keys = (rotation if source is query else self._rotation(source, None)).rotate(keys)
        options, tokens = self._gates(mixed, keys, values, self.feature_map)
        written, of_rule = self.rule.write(tokens)
        return LinearInputs(
            (queries, self.rule.keys(tokens), written), options | of_rule, tokens, mixed.gate, tail, last
        )

    def _mixed(
        self, query: Tensor, source: Tensor, token_mask: TokenMask, last: Tensor | None
    ) -> tuple[MixedTokens, Tensor | None]:
        """What each map reads, with the tokens before where the layer has a shift, and the last token then."""
        if self.shift is None:
            return MixedTokens(query, source, source, source, source, query), None
        tokens = token_mask.hide(query)
        earlier = token_mask.apply(self.shift.shifted, query, last)
        return self.shift(tokens, earlier), tokens[:, -1:].clone() if tokens.shape[1] else last

    def _heads(
        self, mixed: MixedTokens, token_mask: TokenMask, before: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Queries, keys and values of all heads, convolved where the layer has a convolution, and its tail."""
        projections = self.projections
        if self.convolution is None and self.shift is None:
            queries = projections.queries(mixed.query)
            return (queries, *projections.keys_and_values(mixed.key)), None
        projected = [projections.query(mixed.query), projections.key(mixed.key), projections.value_map()(mixed.value)]
        if self.convolution is None:
            return split_heads(projections, *projected), None
        rows = torch.cat(projected, -1)
        convolved = token_mask.apply(self.convolution, rows, before)
        parts = convolved.split([part.shape[-1] for part in projected], -1)
        return split_heads(projections, *parts), self.convolution.tail(token_mask.hide(rows), before)

    def _output(self, context: Tensor, inputs: LinearInputs) -> Tensor:
        """The output of the layer, from what its queries read."""
        context = self.rule.finish(context, inputs.tokens)
        if self.gate is not None:
            context = self.gate(context, inputs.gate)
        return self.projections.project_output(context)

    def _rotation(self, tokens: Tensor, positions: Tensor | None) -> Rotation:
        """The rotation of tokens (batch, length, dim) at these positions; 0..length-1 by default."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        dtype = torch.float64 if tokens.dtype == torch.float64 else torch.float32
        return self.rotary.rotation(positions, dtype=dtype)  # type: ignore[union-attr]

    __prepare_scriptable__ = refuse_scripting

    def extra_repr(self) -> str:
        decay = repr(self._learned_decay) if self.fixed_decay is None else "FixedDecay(...)"
        return f"feature_map={self.feature_map!r}, causal={self.causal}, decay={decay}, rule={self.rule!r}"


def _check_order(causal: bool, **parts: object) -> None:
    """Check that a layer with one of these parts is causal.

    Raises:
        ConfigurationError: it is not.
    """
    given = next((f"{name}={part!r}" for name, part in parts.items() if part is not None), None)
    if given is not None and not causal:
        raise ConfigurationError(
            f"{given} needs an order of the tokens: make the layer with causal=True, or leave it out"
        )


def _refuse_bias(bias: object) -> None:
    if bias is not None:
        raise ConfigurationError(
            "linear attention has no bias, as its weights are products of features that are summed before any query is "
            "known: leave bias out, or use regard.nn.Attention"
        )
