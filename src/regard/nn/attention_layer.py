"""Attention as a layer: projections around `regard.attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..attention import Seen, attention, observe
from ..biases import Bias
from ..errors import ConfigurationError, ShapeError
from ..kernels.validation import HasPairs, Options
from ..lenses import Lens
from ..masks import Mask, as_mask
from ..positions import Rotary, Rotation
from ..scores import Score
from .caches import KVCache, MemoryCache
from .input_checks import check_positions, probability
from .layer_arguments import HeldBias, check_cache, check_no_rotation, joined_bias, joined_mask, learned_sinks
from .projections import Projections

Heads = tuple[Tensor, Tensor, Tensor]


class Beside(TypedDict, total=False):
    """What a call adds to a layer; `Attention.forward` says what each means."""

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    positions: Tensor | None
    rotation: Rotation | None


class Attention(nn.Module):
    """concat_h( softmax( f(Q_h, K_g) + B, where M ) · V_g ) W_o: self- and cross-attention, with heads of all kinds.

    The keys come from the input itself, or from `memory`. What may be said of the attention is said by objects; mask
    and bias belong to the layer, and those of a call join them.

    Shapes: query (batch, M, dim), memory (batch, N, memory_dim), output (batch, M, dim).

    Args:
        projections: dims and heads, and the linear maps.
        score: f, from `regard.scores`, over queries and keys of head_dim, one for all heads; q · k / √head_dim
            without one.
        mask: M, of every call, such as `causal() & window(before=511)`.
        bias: B, of every call; its `nn.Parameter`s are parameters of the layer.
        rotary: turns queries and keys by their positions, after the projections' norm.
        softcap: c · tanh(score / c) before bias and mask.
        sinks: (num_heads,), the first values of a learned logit per head that takes weight and gives no value.
        dropout: the probability with which a weight is dropped in training.

    Raises:
        ConfigurationError: what is given is not of its kind, or out of its range.
        ShapeError: sinks that are not one for each head.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2; what else is here has its source where it is made.

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
        projections: Projections,
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        rotary: Rotary | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.projections = projections
        self.score = score
        self.mask = None if mask is None else as_mask(mask)
        self.bias = None if bias is None else HeldBias(bias)
        self.rotary = _fitting(rotary, projections.head_dim)
        self.softcap = softcap
        self.sinks = None if sinks is None else learned_sinks(sinks, projections.num_heads)
        self.dropout = probability("dropout", dropout)

    def forward(
        self,
        query: Tensor,
        memory: Tensor | MemoryCache | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """The attention of a sequence to itself, or to a memory.

        Args:
            query: (batch, M, dim), what asks; without a memory it is asked, too.
            memory: (batch, N, memory_dim), or what `remember` made of it.
            mask: which pairs exist, beside the layer's own: from `regard.masks`, or bool (True = attend) that
                broadcasts to (batch, heads, M, N).
            bias: what is added, beside the layer's own: from `regard.biases`, or numbers that broadcast likewise.
            positions: of the query's tokens, whole numbers (M,) or (batch, M); without them 0..M-1.
            memory_positions: of the memory's, likewise; 0..N-1.
            rotation: what `rotary.rotation(positions)` gave for the query's tokens, for layers that share it.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit; memory is missing.
            ConfigurationError: a rotation for a layer that turns nothing.
            MaskError: a mask that does not fit.
        """
        beside: Beside = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options = self._whole(query, memory, memory_positions, beside)
        return self.projections.joined(attention(*heads, **options))

    def observe(
        self,
        query: Tensor,
        *lenses: Lens,
        memory: Tensor | MemoryCache | None = None,
        memory_positions: Tensor | None = None,
        **beside: Unpack[Beside],
    ) -> Seen:
        """`forward`, and what lenses from `regard.lenses` show of its weights: `seen.output`, `seen[lens]`.

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
        heads, options = self._whole(query, memory, memory_positions, beside)
        return self._projected(observe(*heads, *lenses, **options))

    def make_cache(self, max_length: int | None = None) -> KVCache:
        """An empty cache for decoding, that holds what the layer's own mask needs and no more.

        See `KVCache.rolling`, and there what `max_length` is for; without a mask the cache grows.
        """
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
        """The attention of the tokens that come next to themselves and to all before, and the cache with them in it.

        One token or many: under a causal mask steps give what `forward` gives for the whole sequence. (`DynamicNTK` and
        `LongRoPE` alone, which turn by the length so far, make a difference.)

        Args:
            query: (batch, M, dim), the next M tokens.
            cache: what the step before returned; to begin with one of `make_cache`, or any `KVCache`.
            mask: beside the layer's own. A mask made of a tensor over pairs counts the keys that the cache has kept.
            bias: beside the layer's own, likewise.
            positions: of the M tokens, (M,) or (batch, M); without them those that follow the cache's. Padding on the
                left sits below 0, with `~prefix(0)` in the mask.
            rotation: of the M tokens, as in `forward`.

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit the layer, or the cache.
            ConfigurationError: a cache that drops by a mask which is not this layer's.
        """
        beside: Beside = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
        heads, options, cache = self._next(query, cache, beside)
        return self.projections.joined(attention(*heads, **options)), cache.trimmed()

    def observe_step(
        self, query: Tensor, cache: KVCache, *lenses: Lens, **beside: Unpack[Beside]
    ) -> tuple[Seen, KVCache]:
        """`step`, and what lenses show of its weights; their columns are the keys that the cache has kept."""
        heads, options, cache = self._next(query, cache, beside)
        return self._projected(observe(*heads, *lenses, **options)), cache.trimmed()

    def remember(self, memory: Tensor, positions: Tensor | None = None) -> MemoryCache:
        """Keys and values of a memory, once for all calls that attend to it.

        Shapes: memory (batch, N, memory_dim), positions (N,) or (batch, N); without them 0..N-1.
        """
        keys, values = self.projections.keys_and_values(memory)
        if positions is not None:
            check_positions("memory_positions", positions, memory.shape[0], memory.shape[1])
        (keys,) = self._turned(positions, keys)
        return MemoryCache(keys if self.score is None else self.score.project_key(keys), values, positions)

    def _whole(
        self, query: Tensor, memory: Tensor | MemoryCache | None, memory_positions: Tensor | None, beside: Beside
    ) -> tuple[Heads, Options]:
        """What `regard.attention` is asked for one whole sequence."""
        positions = beside.get("positions")
        queries = self.projections.queries(query)
        if positions is not None:
            check_positions("positions", positions, query.shape[0], query.shape[1])
        if memory is not None:
            return self._cross(queries, memory, memory_positions, beside)
        self._check_self_attention("forward")
        if memory_positions is not None:
            raise ConfigurationError("memory_positions were given without memory: positions= are those of the query")
        keys, values = self.projections.keys_and_values(query)
        queries, keys = self._turned(positions, queries, keys, rotation=beside.get("rotation"))
        return (queries, keys, values), self._options(self.score, beside, positions, positions)

    def _cross(
        self, queries: Tensor, memory: Tensor | MemoryCache, memory_positions: Tensor | None, beside: Beside
    ) -> tuple[Heads, Options]:
        """The same for queries over a memory; unless told otherwise both sequences begin at position 0."""
        if not isinstance(memory, MemoryCache):
            memory = self.remember(memory, memory_positions)
        elif memory_positions is not None:
            raise ConfigurationError("memory_positions go to remember(memory, positions): this memory has its own")
        positions = beside.get("positions")
        (queries,) = self._turned(positions, queries, rotation=beside.get("rotation"))
        length = queries.shape[2]
        if positions is None and (length != len(memory) or memory.positions is not None):
            positions = torch.arange(length, device=queries.device)
        score = None if self.score is None else self.score.over_projected_keys()
        return (queries, memory.keys, memory.values), self._options(score, beside, positions, memory.positions)

    def _next(self, query: Tensor, cache: KVCache, beside: Beside) -> tuple[Heads, Options, KVCache]:
        """The same for the tokens that follow a cache, and the cache with them in it."""
        self._check_self_attention("step")
        check_cache(cache, self.mask)
        queries = self.projections.queries(query)
        keys, values = self.projections.keys_and_values(query)
        positions = beside.get("positions")
        at = cache.following(query.shape[1], query.device) if positions is None else positions
        check_positions("positions", at, query.shape[0], query.shape[1])
        queries, keys = self._turned(at, queries, keys, rotation=beside.get("rotation"))
        cache = cache.append(keys, values, positions)
        # Where keys sit at 0..N-1 nothing is said of positions: that is what they are without being told.
        places = (None, None) if cache.counted else (at, cache.positions)
        return (queries, cache.keys, cache.values), self._options(self.score, beside, *places), cache

    def _turned(self, positions: Tensor | None, *heads: Tensor, rotation: Rotation | None = None) -> tuple[Tensor, ...]:
        """Heads of one sequence, turned by its positions."""
        if self.rotary is None:
            check_no_rotation(rotation)
            return heads
        first = heads[0]
        if positions is None:
            positions = torch.arange(first.shape[2], device=first.device)
        if rotation is None:
            dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
            rotation = self.rotary.rotation(positions, dtype=dtype)
        return tuple(rotation.turn(tensor) for tensor in heads)

    def _options(
        self, score: HasPairs | None, beside: Beside, query_positions: Tensor | None, key_positions: Tensor | None
    ) -> Options:
        """What the layer is, and what a call adds to it."""
        return {
            "score": score,
            "mask": joined_mask(self.mask, beside.get("mask")),
            "bias": joined_bias(self.bias, beside.get("bias")),
            "softcap": self.softcap,
            "sinks": self.sinks,
            "dropout_p": self.dropout if self.training else 0.0,
            "query_positions": query_positions,
            "key_positions": key_positions,
        }

    def _projected(self, seen: Seen) -> Seen:
        return replace(seen, output=self.projections.joined(seen.output))

    def _check_self_attention(self, method: str) -> None:
        if self.projections.memory_dim is not None:
            raise ShapeError(
                f"{method} needs a memory: this layer was made for cross-attention, with "
                f"memory_dim={self.projections.memory_dim}. Give forward(query, memory), or the memory that "
                "remember(memory) has projected"
            )

    def extra_repr(self) -> str:
        said = {"mask": self.mask, "rotary": self.rotary, "softcap": self.softcap, "dropout": self.dropout or None}
        return ", ".join(f"{name}={value!r}" for name, value in said.items() if value is not None)


def _fitting(rotary: Rotary | None, head_dim: int) -> Rotary | None:
    """A rotary that turns no more features than a head has."""
    if rotary is not None and rotary.dim > head_dim:
        raise ConfigurationError(
            f"rotary turns {rotary.dim} features, but heads have head_dim={head_dim}: give Rotary a dim of {head_dim} "
            "or less"
        )
    return rotary
