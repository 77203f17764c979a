"""The layer of PaTH attention, and a cache whose keys are turned by each token that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..attention import Observation, attention, observe
from ..biases import Bias, as_bias, path
from ..biases.householder_products import carried_keys
from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..kernels.hooks import refuse_few_positions
from ..kernels.validation import AttentionOptions
from ..lenses import Lens
from ..linear.linear_mask import mask_at_positions
from ..masks import Mask, causal
from .attention_layer import CallKwargs
from .caches import Cache, KVCache
from .caches.base import attended_positions, check_rows
from .forget_gate import ForgetGate
from .input_checks import probability
from .layer_arguments import check_parts_of_layer
from .projections import Projections
from .reflections import Reflections, TokenReflections
from .self_attention_layer import SelfAttentionLayer
from .token_mask import ALL_TOKENS, TokenMask

FEW_POSITIONS = (
    "PathAttention in ring.sharded would turn keys by the tokens of this process alone: leave the block for it, and "
    "pass it the whole sequence"
)


@dataclass(frozen=True, eq=False)
class PathHeads:
    """Queries, keys and values of all heads, and the bias of their tokens; None where the keys are turned already."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    bias: Bias | None


@dataclass(frozen=True, eq=False)
class PathCache(Cache):
    """Values of all positions so far, and keys that all tokens after them have turned, k_j H_j+1 … H_t.

    So a step turns the keys by its own token alone, in one pass, and any of them can be evicted.

    Args:
        stored: values, and of a layer with a forget gate the sums of the gates as keys.
        keys: (batch, key heads, N, D), in float32 at least: rounding adds up over turns; None before the first token.
        tail: the last rows of the convolution, (batch, width - 1, features).
    """

    stored: KVCache
    keys: Tensor | None = field(default=None, repr=False)
    tail: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.stored)

    def __bool__(self) -> bool:
        return True

    @property
    def next_position(self) -> int | Tensor:
        """Default position of the next token."""
        return self.stored.next_position

    @property
    def nbytes(self) -> int:
        """Allocated bytes of all three."""
        return self.stored.nbytes + sum(part.nbytes for part in (self.keys, self.tail) if part is not None)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> PathCache:
        """The cache after M more tokens, whose keys are given beside those of before, all turned to the last of them.

        Shapes: keys (batch, key heads, N + M, D), values (batch, key heads, M, value dim).
        """
        return replace(self, stored=self.stored.append(keys[..., :0], values, positions), keys=keys)

    def reorder(self, rows: Tensor) -> PathCache:
        """The cache for these rows of the batch, in this order."""
        if self.keys is None:
            return self
        check_rows(rows, self.keys.shape[0])
        return PathCache(self.stored.reorder(rows), self.keys[rows], None if self.tail is None else self.tail[rows])

    def evict(self) -> PathCache:
        """The cache without keys that no later query attends to: tokens that are left keep their turns."""
        kept = self.stored.evict()
        if self.keys is None or len(kept) == len(self.stored):
            return self if kept is self.stored else replace(self, stored=kept)
        before, after = (each.positions.reshape(-1, len(each))[0].contiguous() for each in (self.stored, kept))
        return replace(self, stored=kept, keys=self.keys[:, :, torch.searchsorted(before, after)])


class PathAttention(SelfAttentionLayer[PathHeads, Observation, PathCache]):
    """Causal self-attention whose positions are products of reflections, `biases.path`, which the layer learns.

    Each token mirrors what is before it along a direction of its own, so that how far away a key is depends on what was
    said in between. It takes the place of a rotary embedding. With a forget gate it is PaTH-FoX.

    Shapes: (batch, length, dim) to (batch, length, dim).

    Args:
        projections: dims, heads and the linear maps.
        reflections: w and β of each token; `Reflections(projections)` by default.
        forget_gate: whether each token has a gate for each head too that decays all tokens before it.
        mask: beside the causal one, of every call, such as a window. Padding and documents go to the call: the
            convolution reads them there.
        bias: B, of every call; its `nn.Parameter`s are parameters of the layer.
        dropout: probability of dropping a weight in training.

    The mask of a call is padding, documents, or a bool tensor of keys: tokens that it hides turn nothing.

    Raises:
        ConfigurationError: projections of a memory.
        MaskError: a call whose mask is another.

    Source: Yang et al. 2025, PaTH Attention (arXiv 2505.16381), sections 3.1 and 3.4 (decoding).

    >>> import torch, regard
    >>> from regard.nn import PathAttention, Projections
    >>> layer = PathAttention(Projections(16, num_heads=4, num_kv_heads=2, bias=False), forget_gate=True)
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
        reflections: Reflections | None = None,
        forget_gate: bool = False,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        dropout: float = 0.0,
    ) -> None:
        check_parts_of_layer(projections, None)
        if projections.memory_dim is not None:
            raise ConfigurationError(
                "PathAttention turns the keys by the tokens between them and the query, of one sequence; the "
                f"projections have memory_dim={projections.memory_dim}: leave it out, or take Attention"
            )
        super().__init__(projections, causal() if mask is None else causal() & mask, bias, None)
        self.reflections = Reflections(projections) if reflections is None else reflections
        heads = projections.num_heads, projections.num_kv_heads
        self.forget_gate = ForgetGate(projections.dim, *heads) if forget_gate else None
        self.dropout = probability("dropout", dropout)

    def make_cache(self, max_length: int | None = None) -> PathCache:
        """An empty cache for decoding, which evicts keys by the layer's own mask; `max_length` as in `KVCache`."""
        return PathCache(KVCache() if self.mask is None else KVCache.rolling(self.mask, max_length))

    def _heads(self, query: Tensor, call: CallKwargs, queries: Tensor, keys: Tensor, values: Tensor) -> PathHeads:
        refuse_few_positions(FEW_POSITIONS)
        of_tokens = self.reflections(query, self._token_mask(query, call, call.get("positions")))
        sums = None if self.forget_gate is None else self.forget_gate.sums(query)
        return PathHeads(queries, keys, values, self._bias(of_tokens, sums, queries))

    def _step_inputs(
        self, query: Tensor, cache: PathCache, call: CallKwargs
    ) -> tuple[PathHeads, AttentionOptions, PathCache]:
        if not isinstance(cache, PathCache):
            raise ConfigurationError(
                f"step needs a PathCache, as layer.make_cache() returns; it got a {type(cache).__name__}. Keys of this "
                "layer are turned by each token that follows"
            )
        new, cache = self._new_positions(query, cache, call), cache.evict()
        queries, keys, values = self._projected(query, new, call.get("rotation"))
        of_tokens = self.reflections(query, self._new_token_mask(query, call, new, cache), cache.tail)
        before = at_least_float32(keys[:, :, :0] if cache.keys is None else cache.keys)
        turned = carried_keys(before, keys, of_tokens.vectors, of_tokens.beta)
        sums = keys[..., :0]
        if self.forget_gate is not None:
            sums = self.forget_gate.with_sums(sums, query, cache.stored)
        stored = cache.stored.append(sums, values, call.get("positions"))
        sums = None if self.forget_gate is None else self.forget_gate.split(stored.keys, 0)[1]
        if query.shape[1] == 1:
            heads = PathHeads(queries, turned.to(keys.dtype), stored.values, self._bias(None, sums, queries))
        else:
            all_keys = torch.cat([before.to(keys.dtype), keys], -2)
            heads = PathHeads(queries, all_keys, stored.values, self._bias(of_tokens.after(before), sums, queries))
        at = attended_positions(stored, new)
        return heads, self._options(call, *at), PathCache(stored, turned, of_tokens.tail)

    def _attend(self, query: Tensor, heads: PathHeads, options: AttentionOptions) -> Tensor:
        output = attention(heads.queries, heads.keys, heads.values, **self._with_bias(heads, options))
        return self.projections.project_output(output)

    def _observe(
        self, query: Tensor, heads: PathHeads, options: AttentionOptions, lenses: Sequence[Lens]
    ) -> Observation:
        seen = observe(heads.queries, heads.keys, heads.values, *lenses, **self._with_bias(heads, options))
        return replace(seen, output=self.projections.project_output(seen.output))

    def _with_bias(self, heads: PathHeads, options: AttentionOptions) -> AttentionOptions:
        """The options with the bias of the tokens, and dropout."""
        given, own = options.get("bias"), heads.bias
        both = own if given is None else as_bias(given) if own is None else own + as_bias(given)
        return {**options, "bias": both, "dropout_p": self.dropout if self.training else 0.0}

    def _bias(self, of_tokens: TokenReflections | None, sums: Tensor | None, queries: Tensor) -> Bias | None:
        """The bias of reflections, and of the forget gates with these sums, for queries that are the last tokens."""
        turns = None if of_tokens is None else path(of_tokens.vectors, of_tokens.beta)
        if self.forget_gate is None or sums is None:
            return turns
        gates = self.forget_gate.bias(sums, queries.shape[2], queries.dtype)
        return gates if turns is None else turns + gates

    def _token_mask(self, query: Tensor, call: CallKwargs, positions: Tensor | None) -> TokenMask:
        """Which tokens the mask of a call leaves, and their documents."""
        mask = call.get("mask")
        if mask is None:
            return ALL_TOKENS
        return TokenMask.from_mask(mask if positions is None else mask_at_positions(mask, positions, True), query)

    def _new_token_mask(self, query: Tensor, call: CallKwargs, new: Tensor, cache: PathCache) -> TokenMask:
        """The same of a step, where the columns of a tensor are all keys.

        Raises:
            ConfigurationError: documents, whose earlier tokens the convolution would have to tell apart.
        """
        mask, count = call.get("mask"), query.shape[1]
        if isinstance(mask, Tensor):
            call = {**call, "mask": mask[..., -count:]}
        token_mask = self._token_mask(query, call, new)
        if token_mask.documents is not None:
            raise ConfigurationError(
                "a step goes on with one text for each row of the batch, and the mask has documents: read packed texts "
                "by forward, or put each into a row of its own"
            )
        return token_mask

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}"
