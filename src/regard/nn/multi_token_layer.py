"""The layer of multi-token attention, and a cache that has the last queries beside keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from ..attention import Observation, attention, observe
from ..biases import Bias
from ..errors import ConfigurationError
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask, as_mask, causal, window
from ..normalizers import MultiToken
from ..positions import Rotary, Rotation
from .attention_layer import CallKwargs, Heads
from .caches import Cache, KVCache
from .input_checks import check_positions
from .layer_arguments import (
    BiasModule,
    NormalizerModule,
    check_no_rotation,
    checked_rotary,
    combine_biases,
    combine_masks,
)
from .projections import Projections


@dataclass(frozen=True, eq=False)
class QueryCache(Cache):
    """Keys and values of all positions so far, and the last queries, which the next rows look back to.

    stored: keys and values. queries: as keys of a cache whose values have dim 0, rolling by how far rows look back.
    """

    stored: KVCache
    queries: KVCache

    @classmethod
    def empty(cls, rows_before: int) -> QueryCache:
        """Without a token, for rows that look back so far."""
        return cls(KVCache(), KVCache.rolling(causal() & window(before=rows_before)))

    @property
    def next_position(self) -> int | Tensor:
        """Default position of the next token."""
        return self.stored.next_position

    @property
    def nbytes(self) -> int:
        """Allocated bytes of both."""
        return self.stored.nbytes + self.queries.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> QueryCache:
        """The cache after M more tokens, whose queries are appended apart."""
        return replace(self, stored=self.stored.append(keys, values, positions))

    def append_queries(self, queries: Tensor, positions: Tensor | None = None) -> QueryCache:
        """The cache with the queries of M more tokens, (batch, heads, M, dim)."""
        return replace(self, queries=self.queries.append(queries, queries[..., :0], positions))

    def reorder(self, rows: Tensor) -> QueryCache:
        """The cache for these rows of the batch, in this order."""
        return QueryCache(self.stored.reorder(rows), self.queries.reorder(rows))

    def evict(self) -> QueryCache:
        """The cache without queries that no later row looks back to; keys and values stay: earlier rows need them."""
        return replace(self, queries=self.queries.evict())


class MultiTokenAttention(nn.Module):
    """Self-attention with `normalizers.MultiToken`: heads, their norm, joined and projected.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, heads and the linear maps.
        normalizer: kernels and matrices; its `nn.Parameter`s are parameters of the layer.
        mask: M, of every call.
        bias: B, of every call; its `nn.Parameter`s are parameters of the layer.
        rotary: rotary position embedding.
        norm: called with the dim of a value, returns what each head goes through on its own before they are joined, a
            norm or a norm and a gate; None for nothing.

    Raises:
        ConfigurationError: another normalizer; projections of a memory.

    Source: Golovneva et al. 2025 (arXiv 2504.00927); the norm of heads is that of section 3.4.

    >>> import torch, regard
    >>> from regard.nn import MultiTokenAttention, Projections
    >>> convolving = regard.normalizers.MultiToken.learned(4, queries=3, keys=5)
    >>> layer = MultiTokenAttention(Projections(16, num_heads=4), convolving, mask=regard.masks.causal())
    >>> x, cache = torch.randn(2, 7, 16), layer.make_cache()
    >>> first, cache = layer.step(x[:, :4], cache)
    >>> last, cache = layer.step(x[:, 4:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        projections: Projections,
        normalizer: MultiToken,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        rotary: Rotary | None = None,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(normalizer, MultiToken) or projections.memory_dim is not None:
            raise ConfigurationError(
                f"this layer needs a normalizers.MultiToken and projections of one sequence; it was given "
                f"{normalizer!r} and memory_dim={projections.memory_dim}: Attention takes others, and a memory"
            )
        self.projections, self.normalizer = projections, NormalizerModule(normalizer)
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else BiasModule(bias)
        self.rotary = checked_rotary(rotary, projections.head_dim)
        self.norm = nn.Identity() if norm is None else norm(projections.value_dim)

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
        return self._output(attention(*heads, **options))

    def observe(self, query: Tensor, *lenses: Lens, **call: Unpack[CallKwargs]) -> Observation:
        """`forward` with lenses on its weights."""
        heads, options = self._sequence_inputs(query, call)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self._output(seen.output))

    def make_cache(self, max_length: int | None = None) -> QueryCache:
        """An empty cache for decoding, of any length: earlier rows need keys that the mask hides from later ones."""
        return QueryCache.empty(self.normalizer().rows_before or 0)

    def step(
        self,
        query: Tensor,
        cache: QueryCache,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, QueryCache]:
        """One decoding step: the next M tokens attend to themselves and the cached ones, and look back to queries.

        Under a causal mask steps of any size equal `forward` on the whole sequence. Tensors as mask or bias have the
        rows of the last cached queries too.
        """
        call: CallKwargs = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options, cache = self._step_inputs(query, cache, call)
        context = attention(*heads, **options)
        return self._output(context[:, :, -query.shape[1] :]), cache.evict()

    def observe_step(
        self, query: Tensor, cache: QueryCache, *lenses: Lens, **call: Unpack[CallKwargs]
    ) -> tuple[Observation, QueryCache]:
        """`step` with lenses on its weights, whose rows are those of the last cached queries and the M tokens."""
        heads, options, cache = self._step_inputs(query, cache, call)
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self._output(seen.output[:, :, -query.shape[1] :])), cache.evict()

    def _sequence_inputs(self, query: Tensor, call: CallKwargs) -> tuple[Heads, AttentionOptions]:
        """Arguments of `attention` for a whole sequence."""
        positions = call.get("positions")
        if positions is not None:
            check_positions("positions", positions, query.shape[0], query.shape[1])
        return self._projected(query, positions, call), self._options(call, positions, positions)

    def _step_inputs(
        self, query: Tensor, cache: QueryCache, call: CallKwargs
    ) -> tuple[Heads, AttentionOptions, QueryCache]:
        """Arguments of `attention` for the tokens after a cache and the rows before them, and the cache extended."""
        given, count = call.get("positions"), query.shape[1]
        new = cache.next_positions(count, query.device) if given is None else given
        check_positions("positions", new, query.shape[0], count)
        queries, keys, values = self._projected(query, new, call)
        cache = cache.append(keys, values, given).append_queries(queries, given)
        rows = min(count + (self.normalizer().rows_before or 0), len(cache.queries))
        at = (None, None)
        if not cache.stored.has_default_positions:
            at = cache.queries.positions[..., -rows:], cache.stored.positions
        heads = cache.queries.keys[:, :, -rows:], cache.stored.keys, cache.stored.values
        return heads, self._options(call, *at), cache

    def _projected(self, query: Tensor, positions: Tensor | None, call: CallKwargs) -> Heads:
        """Queries, keys and values, rotated."""
        queries, (keys, values) = self.projections.queries(query), self.projections.keys_and_values(query)
        rotation = call.get("rotation")
        if self.rotary is None:
            check_no_rotation(rotation)
            return queries, keys, values
        at = torch.arange(query.shape[1], device=query.device) if positions is None else positions
        if rotation is None:
            rotation = self.rotary.rotation(at, dtype=torch.promote_types(queries.dtype, torch.float32))
        return rotation.rotate(queries), rotation.rotate(keys), values

    def _options(
        self, call: CallKwargs, query_positions: Tensor | None, key_positions: Tensor | None
    ) -> AttentionOptions:
        return {
            "mask": combine_masks(self.mask, call.get("mask")),
            "bias": combine_biases(self.bias, call.get("bias")),
            "query_positions": query_positions,
            "key_positions": key_positions,
            "normalizer": self.normalizer(),
        }

    def _output(self, context: Tensor) -> Tensor:
        return self.projections.project_output(self.norm(context))

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"
