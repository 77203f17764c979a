"""The layer of Shaw et al.: a learned vector for each distance, added to the keys and to the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..attention import Observation, attention, observe
from ..biases import Bias, as_bias, shaw
from ..errors import ConfigurationError
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..masks import Mask
from ..utils.numbers import whole_number
from ..value_vectors import relative_value_attention
from .attention_layer import CallKwargs, Heads, Store
from .caches import KVCache
from .caches.attending_cache import AttendingCache
from .caches.base import attended_positions
from .input_checks import probability
from .layer_arguments import check_cache
from .projections import Projections
from .self_attention_layer import SelfAttentionLayer


class RelativeAttention(SelfAttentionLayer[Heads, Observation, Store]):
    """Σ_j w_ij (v_j + a^V[δ]) with w = softmax(q_i · (k_j + a^K[δ]) / √D), δ = clip(j - i, -before, after).

    Self-attention that adds a learned vector to each key and each value, by its distance from the query: positions of
    Shaw et al. They are `biases.shaw` and `relative_value_attention`, without anything of size length².

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, heads and the linear maps.
        before: the distance from which on earlier keys share a vector.
        after: the same of later keys; 0 with a causal mask.
        values: whether values have vectors; the paper finds those of keys nearly as good alone (Table 3).
        shared: whether all heads have the same vectors, as in the paper.
        mask: M, of every call.
        bias: B, of every call; its `nn.Parameter`s are parameters of the layer.
        dropout: probability of dropping a weight in training.

    `key_vectors` (1 or heads, before + 1 + after, head_dim) and `value_vectors` (..., value_dim), Xavier uniform, are
    parameters; row 0 is for keys `before` or more positions before the query. A cache is that of `Attention`.

    Raises:
        ConfigurationError: projections of a memory; before or after that is no whole number of at least 0.

    Source: Shaw et al. 2018 (arXiv 1803.02155), Eq. 3 and 4.

    >>> import torch, regard
    >>> from regard.nn import Projections, RelativeAttention
    >>> layer = RelativeAttention(Projections(16, num_heads=4), before=3, after=0, mask=regard.masks.causal())
    >>> x, cache = torch.randn(2, 7, 16), layer.make_cache()
    >>> first, cache = layer.step(x[:, :6], cache)
    >>> last, cache = layer.step(x[:, 6:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), layer(x), atol=1e-5)
    True
    """

    def __init__(
        self,
        projections: Projections,
        *,
        before: int,
        after: int,
        values: bool = True,
        shared: bool = True,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        if projections.memory_dim is not None:
            raise ConfigurationError(
                "RelativeAttention counts positions between tokens of one sequence, and the projections have "
                f"memory_dim={projections.memory_dim}: leave it out, or take Attention"
            )
        super().__init__(projections, mask, bias, None)
        self.before, self.after = whole_number("before", before, least=0), whole_number("after", after, least=0)
        self.dropout = probability("dropout", dropout)
        heads = 1 if shared else projections.num_heads
        self.key_vectors = _vectors(heads, self.before + 1 + self.after, projections.head_dim)
        self.value_vectors = _vectors(heads, self.before + 1 + self.after, projections.value_dim) if values else None

    def make_cache(self, max_length: int | None = None) -> KVCache:
        """An empty cache for decoding, as `Attention.make_cache`."""
        return KVCache() if self.mask is None else KVCache.rolling(self.mask, max_length)

    def _heads(self, query: Tensor, call: CallKwargs, queries: Tensor, keys: Tensor, values: Tensor) -> Heads:
        return queries, keys, values

    def _step_inputs(self, query: Tensor, cache: Store, call: CallKwargs) -> tuple[Heads, AttentionOptions, Store]:
        check_cache(cache, self.mask)
        if isinstance(cache, AttendingCache):
            raise ConfigurationError(
                f"a {type(cache).__name__} computes the attention of a step itself, without the vectors that this "
                "layer adds to values: give it layer.make_cache() or another KVCache"
            )
        new = self._new_positions(query, cache, call)
        queries, keys, values = self._projected(query, new, call.get("rotation"))
        cache = cache.append(keys, values, call.get("positions"))
        at = attended_positions(cache, new)
        return (queries, cache.keys, cache.values), self._options(call, *at), cache

    def _attend(self, query: Tensor, heads: Heads, options: AttentionOptions) -> Tensor:
        return self.projections.project_output(self._context(heads, self._with_vectors(options)))

    def _observe(self, query: Tensor, heads: Heads, options: AttentionOptions, lenses: Sequence[Lens]) -> Observation:
        options = self._with_vectors(options)
        context = self._context(heads, options)  # lenses show the weights, which are the same without the vectors
        seen = observe(*heads, *lenses, **options)
        return replace(seen, output=self.projections.project_output(context))

    def _context(self, heads: Heads, options: AttentionOptions) -> Tensor:
        if self.value_vectors is None:
            return attention(*heads, **options)
        vectors = self.value_vectors
        return relative_value_attention(*heads, vectors, before=self.before, after=self.after, **options)

    def _with_vectors(self, options: AttentionOptions) -> AttentionOptions:
        """The options with the bias of the keys' vectors, and dropout."""
        own, given = shaw(self.key_vectors, before=self.before, after=self.after), options.get("bias")
        both = own if given is None else own + as_bias(given)
        return {**options, "bias": both, "dropout_p": self.dropout if self.training else 0.0}

    def extra_repr(self) -> str:
        return f"before={self.before}, after={self.after}, mask={self.mask!r}"


def _vectors(heads: int, distances: int, dim: int) -> nn.Parameter:
    """The first vectors of each distance."""
    return nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, distances, dim)))
