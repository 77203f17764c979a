"""The layer of multi-token attention, and a cache that has the last queries beside keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..attention import Observation, attention, observe
from ..biases import Bias
from ..errors import ConfigurationError
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask, causal, window
from ..normalizers import MultiToken
from ..positions import Rotary
from .attention_layer import CallKwargs, Heads
from .caches import Cache, KVCache
from .layer_arguments import NormalizerModule
from .projections import Projections
from .self_attention_layer import SelfAttentionLayer


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


class MultiTokenAttention(SelfAttentionLayer[Heads, Observation, QueryCache]):
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
        if not isinstance(normalizer, MultiToken) or projections.memory_dim is not None:
            raise ConfigurationError(
                f"this layer needs a normalizers.MultiToken and projections of one sequence; it was given "
                f"{normalizer!r} and memory_dim={projections.memory_dim}: Attention takes others, and a memory"
            )
        super().__init__(projections, mask, bias, rotary)
        self.normalizer = NormalizerModule(normalizer)
        self.norm = nn.Identity() if norm is None else norm(projections.value_dim)

    def make_cache(self, max_length: int | None = None) -> QueryCache:
        """An empty cache for decoding, of any length: earlier rows need keys that the mask hides from later ones."""
        return QueryCache.empty(self.normalizer().rows_before or 0)

    def _heads(self, query: Tensor, call: CallKwargs, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        return queries, keys, values

    def _step_inputs(
        self, query: Tensor, cache: QueryCache, call: CallKwargs
    ) -> tuple[Heads, AttentionOptions, QueryCache]:
        """Those of the rows before the tokens too, as far as these look back: tensors as mask or bias have them."""
        given, count = call.get("positions"), query.shape[1]
        queries, keys, values = self._projected(query, self._new_positions(query, cache, call), call.get("rotation"))
        cache = cache.append(keys, values, given).append_queries(queries, given)
        rows = min(count + (self.normalizer().rows_before or 0), len(cache.queries))
        at = (None, None)
        if not cache.stored.has_default_positions:
            at = cache.queries.positions[..., -rows:], cache.stored.positions
        heads = cache.queries.keys[:, :, -rows:], cache.stored.keys, cache.stored.values
        return heads, self._options(call, *at), cache

    def _attend(self, query: Tensor, heads: Heads, options: AttentionOptions) -> Tensor:
        options["normalizer"] = self.normalizer()
        return self._output(attention(*heads, **options), query)

    def _observe(self, query: Tensor, heads: Heads, options: AttentionOptions, lenses: Sequence[Lens]) -> Observation:
        options["normalizer"] = self.normalizer()
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self._output(seen.output, query))

    def _output(self, context: Tensor, query: Tensor) -> Tensor:
        """The output for the last rows, which are those of the tokens."""
        return self.projections.project_output(self.norm(context[:, :, -query.shape[1] :]))

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"
