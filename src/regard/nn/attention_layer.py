"""The attention layer: linear projections around `regard.attention`, for whole sequences and decoding steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from ..attention import Observation, attention, observe
from ..biases import Bias, as_bias
from ..core.grid import from_zero
from ..core.normalizer import Normalizer
from ..errors import ConfigurationError, ShapeError
from ..kernels.validation import AttentionOptions, ScoreLike, check_score, check_softcap
from ..lenses import Lens
from ..masks import Mask, as_mask
from ..positions import Rotary, Rotation
from ..scores import Score
from ..utils.numbers import truth_value
from .caches import KeyValueStore, KVCache, ProjectedMemory, WeighedCache
from .caches.attending_cache import AttendingCache, Heads
from .caches.base import attended_positions, has_known_positions
from .forget_gate import ForgetGate
from .input_checks import check_positions, probability, refuse_scripting
from .key_selection import KeySelection
from .layer_arguments import (
    BiasModule,
    NormalizerModule,
    check_cache,
    check_no_rotation,
    check_no_selection,
    check_parts_of_layer,
    checked_rotary,
    combine_biases,
    combine_masks,
    learned_sinks,
)
from .output_gate import OutputGate
from .projections import Projections, QueryProjections

Store = TypeVar("Store", bound=KeyValueStore)


class CallKwargs(TypedDict, total=False):
    """Keyword arguments of one call that are combined with the layer's own; documented in `Attention.forward`."""

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    positions: Tensor | None
    rotation: Rotation | None
    selection: KeySelection | None


class SharedCallKwargs(CallKwargs, total=False):
    """Those of a call that may read the keys and values of another layer; documented in `Attention.forward`."""

    keys: ProjectedMemory | None


class CachedAttention(nn.Module, ABC):
    """Base class of self-attention layers that decode with a cache of keys and values.

    A subclass has a mask, a bias, a rotary embedding and a dropout of its own, which are combined with those of a call,
    and computes from the next tokens what its cache stores and what `regard.attention` gets.
    """

    mask: Mask | None
    bias: BiasModule | None
    rotary: Rotary | None
    dropout: float

    def make_cache(self, max_length: int | None = None) -> KVCache:
        """An empty cache for decoding, which evicts keys by the layer's own mask; without a mask it grows.

        `max_length` as in `KVCache.rolling`.
        """
        return KVCache() if self.mask is None else KVCache.rolling(self.mask, max_length)

    def step(
        self,
        query: Tensor,
        cache: Store,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
        selection: KeySelection | None = None,
    ) -> tuple[Tensor, Store]:
        """One decoding step: attention of the next M tokens to themselves and the cached ones, and the extended cache.

        Under a causal mask steps of any size equal `forward` on the whole sequence, except with `DynamicNTK` and
        `LongRoPE`, whose frequencies depend on the length so far.

        Args:
            query: (batch, M, dim), the next M tokens.
            cache: returned by the previous step; first from `make_cache()`, any `KVCache` or other `KeyValueStore`.
            mask: intersected with the layer's own. The columns of a tensor over pairs are the keys in the cache.
            bias: added to the layer's own, likewise.
            positions: of the M tokens, (M,) or (batch, M); by default those that follow the cache's. Left padding has
                positions below 0, with `~prefix(0)` in the mask.
            rotation: of the M tokens, as in `forward`.
            selection: of layers that attend to chosen keys, as in `LatentAttention.forward`.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit the layer, or the cache.
            ConfigurationError: a cache that evicts by another mask than this layer's; a selection for a layer without
                chosen keys.
        """
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        if selection is not None:
            call["selection"] = selection
        heads, options, cache = self._step_inputs(query, cache, call)
        if isinstance(cache, AttendingCache):
            context, after = cache.attend(heads, options)
            return self._step_output(context, query), after  # type: ignore[return-value]
        return self._step_output(attention(*heads, **options), query), cache.evict()

    def observe_step(
        self, query: Tensor, cache: Store, *lenses: Lens, **call: Unpack[CallKwargs]
    ) -> tuple[Observation, Store]:
        """`step` with lenses on its weights, whose columns are the keys in the cache."""
        heads, options, cache = self._step_inputs(query, cache, call)
        if isinstance(cache, AttendingCache):
            seen, after = cache.observe(heads, options, *lenses)
        else:
            seen, after = observe(*heads, *lenses, **options), cache.evict()
        return replace(seen, output=self._step_output(seen.output, query)), after  # type: ignore[return-value]

    @abstractmethod
    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        """Arguments of `regard.attention` for the tokens after a cache, and the cache extended by them."""

    @abstractmethod
    def _step_output(self, context: Tensor, query: Tensor) -> Tensor:
        """The output of a step, from the context vectors of its heads and its tokens."""

    def _step_positions(self, query: Tensor, cache: KeyValueStore, call: CallKwargs) -> Tensor:
        """The positions of the next tokens: those of the call, or those that follow the cache's."""
        positions = call.get("positions")
        new = cache.next_positions(query.shape[1], query.device) if positions is None else positions
        check_positions("positions", new, query.shape[0], query.shape[1])
        return new

    def _rotated(
        self, positions: Tensor | None, *heads: Tensor, rotation: Rotation | None = None
    ) -> tuple[Tensor, ...]:
        """Apply the rotary embedding to the heads of one sequence; a layer without one returns them unchanged."""
        rotation = self._rotation(positions, heads[0], rotation)
        return heads if rotation is None else tuple(rotation.rotate(tensor) for tensor in heads)

    def _rotation(self, positions: Tensor | None, heads: Tensor, rotation: Rotation | None) -> Rotation | None:
        """The rotation of a sequence: the given one, or that of its positions; None of a layer without rotary."""
        if self.rotary is None:
            check_no_rotation(rotation)
            return None
        if rotation is not None:
            return rotation
        if positions is None:
            positions = torch.arange(heads.shape[2], device=heads.device)
        dtype = torch.float64 if heads.dtype == torch.float64 else torch.float32
        return self.rotary.rotation(positions, dtype=dtype)

    def _layer_options(
        self, call: CallKwargs, query_positions: Tensor | range | None, key_positions: Tensor | range | None
    ) -> AttentionOptions:
        """Keyword arguments of `regard.attention` that all layers have, combined with those of a call."""
        return {
            "mask": combine_masks(self.mask, call.get("mask")),
            "bias": combine_biases(self.bias, call.get("bias")),
            "dropout_p": self.dropout if self.training else 0.0,
            "query_positions": query_positions,
            "key_positions": key_positions,
        }

    __prepare_scriptable__ = refuse_scripting


class Attention(CachedAttention):
    """concat_h( softmax( f(Q_h, K_g) + B, where M ) · V_g ) W_o: self- and cross-attention, multi-head to multi-query.

    Keys and values come from the input itself, or from `memory`, another sequence. Mask and bias of the layer apply to
    every call; those passed to one call are combined with them.

    Shapes: query (batch, M, dim), memory (batch, N, memory_dim), output (batch, M, dim).

    Args:
        projections: dims, heads and the linear maps; `QueryProjections` for a layer that reads the keys and values of
            another one, `keys=` of each call.
        score: f, from `regard.scores`, over queries and keys of head_dim, shared by all heads; q · k / √head_dim by
            default.
        mask: M, of every call, such as `causal() & window(before=511)`.
        bias: B, of every call; its `nn.Parameter`s are parameters of the layer.
        rotary: rotary position embedding of queries and keys, applied after the norm of the projections.
        softcap: c · tanh(score / c) before bias and mask.
        sinks: (num_heads,), initial values of a learned logit per head that joins the softmax and has no value.
        gate: an `OutputGate` of what each head reads, before the output projection, as in Qwen3-Next.
        dropout: probability of dropping a weight in training.
        normalizer: what takes the place of softmax, from `regard.normalizers`; its `nn.Parameter`s are parameters of
            the layer. `step` needs `Sigmoid` with a bias of its own: the default depends on the number of keys; it
            refuses normalizers of several rows, as `MultiToken`.
        forget_gate: whether each token has a gate for each head, σ of a projection of it, that decays all tokens before
            it: the bias is Σ log f over the tokens after a key, up to the query (`regard.biases.forget_gates`). The
            mask has to be causal. Self-attention only.

    Raises:
        ConfigurationError: an argument of the wrong kind, or out of range; a forget gate in cross-attention.
        ShapeError: sinks that are not one for each head.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; the parts cite their own sources.

    >>> import torch, regard
    >>> from regard.nn import Attention, Projections
    >>> mask = regard.masks.causal() & regard.masks.window(before=3)
    >>> layer = Attention(Projections(16, num_heads=4, num_kv_heads=2), mask=mask).eval()
    >>> x, cache = torch.randn(2, 7, 16), layer.make_cache()
    >>> outputs = []
    >>> with torch.no_grad():
    ...     for token in x.split(1, dim=1):
    ...         output, cache = layer.step(token, cache)
    ...         outputs.append(output)
    >>> torch.allclose(torch.cat(outputs, 1), layer(x), atol=1e-6)
    True
    """

    def __init__(
        self,
        projections: Projections | QueryProjections,
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        rotary: Rotary | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        gate: OutputGate | None = None,
        dropout: float = 0.0,
        normalizer: Normalizer | None = None,
        forget_gate: bool = False,
    ) -> None:
        super().__init__()
        check_softcap(softcap)
        if score is not None:
            check_score(score)
        check_parts_of_layer(projections, gate)
        self.projections: Projections = projections  # type: ignore[assignment]  # or those of queries alone
        self.forget_gate = _forget_gate(self.projections) if truth_value("forget_gate", forget_gate) else None
        self.normalizer = None if normalizer is None else NormalizerModule(normalizer)
        self.score = score
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else BiasModule(bias)
        self.rotary = checked_rotary(rotary, projections.head_dim)
        self.softcap = softcap
        self.sinks = None if sinks is None else learned_sinks(sinks, projections.num_heads)
        self.gate = gate
        self.dropout = probability("dropout", dropout)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | ProjectedMemory | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        rotation: Rotation | None = None,
        keys: ProjectedMemory | None = None,
    ) -> Tensor:
        """Self-attention of a sequence, or cross-attention to a memory.

        Args:
            query: (batch, M, dim), source of the queries; without a memory also of keys and values.
            memory: (batch, N, memory_dim), source of keys and values, or the result of `project_memory` for it.
            mask: intersected with the layer's own: from `regard.masks`, or bool (True = attend) that broadcasts to
                (batch, heads, M, N).
            bias: added to the layer's own: from `regard.biases`, or a float tensor that broadcasts likewise.
            positions: of the query's tokens, integers (M,) or (batch, M); 0..M-1 by default.
            memory_positions: of the memory's tokens, likewise; 0..N-1 by default.
            rotation: result of `rotary.rotation(positions)` for the query's tokens, for layers that share it.
            keys: self-attention with these keys and values in place of its own: those of another layer for the same
                sequence, as its `project_memory` returned them. The query's tokens are the last M of them.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit; memory is missing.
            ConfigurationError: a rotation for a layer without rotary embedding; both keys and a memory; keys of other
                heads, or none for a layer of `QueryProjections`.
            MaskError: a mask that does not fit.
        """
        call: SharedCallKwargs = {
            "mask": mask,
            "bias": bias,
            "positions": positions,
            "rotation": rotation,
            "keys": keys,
        }
        heads, options = self._sequence_inputs(query, memory, memory_positions, call)
        return self._step_output(attention(*heads, **options), query)

    def observe(
        self,
        query: Tensor,
        *lenses: Lens,
        memory: Tensor | ProjectedMemory | None = None,
        memory_positions: Tensor | None = None,
        **call: Unpack[SharedCallKwargs],
    ) -> Observation:
        """`forward` with lenses from `regard.lenses` on its weights: `seen.output`, `seen[lens]`.

        >>> import torch, regard
        >>> weights = regard.lenses.Weights()
        >>> layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
        >>> layer.observe(torch.zeros(1, 2, 8), weights)[weights].detach()
        tensor([[[[1.0000, 0.0000],
                  [0.5000, 0.5000]],
        <BLANKLINE>
                 [[1.0000, 0.0000],
                  [0.5000, 0.5000]]]])
        """
        heads, options = self._sequence_inputs(query, memory, memory_positions, call)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self._step_output(seen.output, query))

    def project_memory(
        self, memory: Tensor, positions: Tensor | None = None, *, rotation: Rotation | None = None
    ) -> ProjectedMemory:
        """Keys and values of a memory, projected once for all calls that attend to it.

        Shapes: memory (batch, N, memory_dim), positions (N,) or (batch, N); 0..N-1 by default. rotation as in
        `forward`, for the memory's tokens.

        Layers of one stack share the keys and values of one of them through it (`keys=` of `forward`):

        >>> import torch
        >>> from regard.nn import Attention, Projections, QueryProjections
        >>> own, reader = Attention(Projections(8, num_heads=2)), Attention(QueryProjections(8, num_heads=2))
        >>> x = torch.randn(1, 5, 8)
        >>> keys = own.project_memory(x)
        >>> torch.equal(own(x, keys=keys), own(x)), reader(x, keys=keys).shape
        (True, torch.Size([1, 5, 8]))
        """
        keys, values = self.projections.keys_and_values(memory)
        if positions is not None:
            check_positions("memory_positions", positions, memory.shape[0], memory.shape[1])
        (keys,) = self._rotated(positions, keys, rotation=rotation)
        return ProjectedMemory(keys if self.score is None else self.score.project_key(keys), values, positions)

    def extend(
        self, query: Tensor, cache: Store, *, positions: Tensor | None = None, rotation: Rotation | None = None
    ) -> Store:
        """The cache with the keys and values of the next M tokens, as `step` appends them; nothing is evicted.

        For layers that share these keys: each of them attends to `ProjectedMemory.of_cache(extended)`, and
        `extended.evict()` goes on. Arguments and errors are those of `step`.
        """
        self._check_self_attention("extend")
        self._refuse_gate("layers that share its keys do not have the sums of its gates")
        check_cache(cache, self.mask)
        if isinstance(cache, WeighedCache):
            raise ConfigurationError(
                "keys that layers share cannot be evicted by the weights of one of them: give the layer that has them "
                "a KVCache, as its make_cache() does"
            )
        keys, values = self.projections.keys_and_values(query)
        new = self._step_positions(query, cache, {"positions": positions})
        (keys,) = self._rotated(new, keys, rotation=rotation)
        return cache.append(keys, values, positions)

    def _sequence_inputs(
        self,
        query: Tensor,
        memory: Tensor | ProjectedMemory | None,
        memory_positions: Tensor | None,
        call: SharedCallKwargs,
    ) -> tuple[Heads, AttentionOptions]:
        """Arguments of `regard.attention` for a whole sequence."""
        positions, shared = call.get("positions"), call.get("keys")
        queries = self.projections.queries(query)
        if positions is not None:
            check_positions("positions", positions, query.shape[0], query.shape[1])
        if shared is not None:
            self._check_shared(shared, memory)
            self._refuse_gate("keys that are given are those of another layer, without the sums of this one's gates")
            return self._shared_inputs(queries, shared, call)
        if memory is not None:
            return self._cross_inputs(queries, memory, memory_positions, call)
        self._check_self_attention("forward")
        if memory_positions is not None:
            raise ConfigurationError("memory_positions were passed without memory: positions= are those of the query")
        keys, values = self.projections.keys_and_values(query)
        queries, keys = self._rotated(positions, queries, keys, rotation=call.get("rotation"))
        gated = call if self.forget_gate is None else self._gated(call, self.forget_gate.sums(query), queries)
        return (queries, keys, values), self._options(self.score, gated, positions, positions)

    def _shared_inputs(
        self, queries: Tensor, shared: ProjectedMemory, call: SharedCallKwargs
    ) -> tuple[Heads, AttentionOptions]:
        """Arguments of `regard.attention` for queries that are the last tokens of given keys and values."""
        positions, length = call.get("positions"), len(shared)
        if positions is None and shared.positions is not None:
            positions = shared.positions[..., length - queries.shape[2] :]
        at = torch.arange(length - queries.shape[2], length, device=queries.device) if positions is None else positions
        (queries,) = self._rotated(at, queries, rotation=call.get("rotation"))
        score = None if self.score is None else self.score.over_projected_keys()
        return (queries, shared.keys, shared.values), self._options(score, call, positions, shared.positions)

    def _cross_inputs(
        self, queries: Tensor, memory: Tensor | ProjectedMemory, memory_positions: Tensor | None, call: CallKwargs
    ) -> tuple[Heads, AttentionOptions]:
        """Arguments of `regard.attention` for queries over a memory; by default both sequences start at position 0."""
        self._refuse_gate("a memory is another sequence")
        if not isinstance(memory, ProjectedMemory):
            memory = self.project_memory(memory, memory_positions)
        elif memory_positions is not None:
            raise ConfigurationError(
                "memory_positions go to project_memory(memory, positions); this memory has its own"
            )
        positions = call.get("positions")
        (queries,) = self._rotated(positions, queries, rotation=call.get("rotation"))
        length = queries.shape[2]
        if positions is None and (length != len(memory) or memory.positions is not None):
            positions = from_zero(length, queries.device)
        score = None if self.score is None else self.score.over_projected_keys()
        return (queries, memory.keys, memory.values), self._options(score, call, positions, memory.positions)

    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        """Arguments of `regard.attention` for the tokens after a cache, and the cache extended by them."""
        self._check_self_attention("step")
        check_cache(cache, self.mask)
        if self.normalizer is not None and self.normalizer.template.rows_before != 0:
            raise ConfigurationError(
                f"a step has none of the queries before its own, and weights of {self.normalizer.template!r} follow "
                "from these: call forward on the whole sequence, or take MultiTokenAttention"
            )
        queries = self.projections.queries(query)
        keys, values = self.projections.keys_and_values(query)
        given, rotation, new = call.get("positions"), call.get("rotation"), None
        turned = self.rotary is not None and rotation is None
        if turned or given is not None or not has_known_positions(cache):  # else nothing reads them
            new = self._step_positions(query, cache, call)
        queries, keys = self._rotated(new, queries, keys, rotation=rotation)
        if self.forget_gate is not None:
            self._check_gated_cache(cache)
            keys = self.forget_gate.with_sums(keys, query, cache)
        cache = cache.append(keys, values, given)
        keys = cache.keys
        if self.forget_gate is not None:
            keys, sums = self.forget_gate.split(keys, queries.shape[-1])
            call = self._gated(call, sums, queries)
        at = attended_positions(cache, new)
        return (queries, keys, cache.values), self._options(self.score, call, *at), cache

    def _gated(self, call: CallKwargs, sums: Tensor, queries: Tensor) -> CallKwargs:
        """The call with the bias of the forget gates, whose sums are (batch, heads, N)."""
        if self.forget_gate is None:
            return call
        gates, passed = self.forget_gate.bias(sums, queries.shape[2], queries.dtype), call.get("bias")
        return {**call, "bias": gates if passed is None else gates + as_bias(passed)}

    def _options(
        self,
        score: ScoreLike | None,
        call: CallKwargs,
        query_positions: Tensor | range | None,
        key_positions: Tensor | range | None,
    ) -> AttentionOptions:
        """Keyword arguments of `regard.attention`: those of the layer, combined with those of a call."""
        check_no_selection(call.get("selection"))
        return {
            **self._layer_options(call, query_positions, key_positions),
            "score": score,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "normalizer": None if self.normalizer is None else self.normalizer(),
        }

    def _step_output(self, context: Tensor, query: Tensor) -> Tensor:
        """The output from the context vectors of the heads, gated by the query's tokens where there is a gate."""
        return self.projections.project_output(context if self.gate is None else self.gate(context, query))

    def _check_shared(self, shared: ProjectedMemory, memory: Tensor | ProjectedMemory | None) -> None:
        """Check keys of another layer.

        Raises:
            ConfigurationError: there is a memory too; they have other heads or dims than those of this layer.
        """
        if memory is not None:
            raise ConfigurationError("keys= are of self-attention, and a memory of cross-attention: pass one of them")
        own = self.projections
        needs = own.num_kv_heads, own.head_dim, own.value_dim
        has = shared.values.shape[1], shared.keys.shape[-1], shared.values.shape[-1]
        if self.score is None and has != needs:
            raise ConfigurationError(
                f"keys= has {has[0]} key heads, with keys of dim {has[1]} and values of {has[2]}, but this layer reads "
                f"{needs[0]}, of {needs[1]} and {needs[2]}: it can share those of a layer with the same heads"
            )

    def _refuse_gate(self, reason: str) -> None:
        """Refuse a call of a layer with a forget gate."""
        if self.forget_gate is not None:
            raise ConfigurationError(
                f"a forget gate decays the tokens before each token of one sequence, and {reason}: call "
                "forward(query), or make the layer without forget_gate"
            )

    def _check_gated_cache(self, cache: object) -> None:
        if isinstance(cache, WeighedCache):
            self._refuse_gate("a cache that evicts by weights may not keep the sums of the last token")

    def _check_self_attention(self, method: str) -> None:
        if self.projections.memory_dim is not None:
            raise ShapeError(
                f"{method} needs a memory: this layer was made for cross-attention, with "
                f"memory_dim={self.projections.memory_dim}. Call forward(query, memory), with the memory itself or "
                "what project_memory(memory) returned"
            )

    def extra_repr(self) -> str:
        shown = {"mask": self.mask, "rotary": self.rotary, "softcap": self.softcap, "dropout": self.dropout or None}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


def _forget_gate(projections: Projections) -> ForgetGate:
    """The forget gate of a layer of self-attention."""
    if projections.memory_dim is not None:
        raise ConfigurationError(
            "a forget gate decays the tokens before each token of one sequence: a layer of cross-attention, with "
            f"memory_dim={projections.memory_dim}, has none. Leave forget_gate out"
        )
    return ForgetGate(projections.dim, projections.num_heads, projections.num_kv_heads)
