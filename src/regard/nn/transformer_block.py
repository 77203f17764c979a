"""Transformer block: self-attention, optional cross-attention and feed-forward, each with residual and norm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Unpack, cast

from torch import Tensor, nn

from ..attention import Observation
from ..biases import Bias
from ..errors import ConfigurationError, ShapeError
from ..lenses import Lens
from ..masks import Mask
from ..positions import Rotation
from .attention_layer import Attention, CallKwargs, SharedCallKwargs
from .caches import Cache, ProjectedMemory
from .input_checks import probability
from .key_selection import KeySelection


class Residual(nn.Module, ABC):
    """Residual connection with normalisation around a sublayer f: `after(x, f(before(x)))`, one for each sublayer."""

    @abstractmethod
    def before(self, x: Tensor) -> Tensor:
        """Input of the sublayer."""

    @abstractmethod
    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        """Output of the residual connection, from its input and the output of the sublayer."""


class PostNorm(Residual):
    """norm(x + dropout(f(x))).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.1 and 5.4.

    >>> import torch
    >>> residual = PostNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[-1.,  1.]])
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.norm(x + self.dropout(branch))


class PreNorm(Residual):
    """x + dropout(f(norm(x))); a stack of such blocks needs a final norm.

    Source: Xiong et al. 2020 (arXiv 2002.04745), Table 1.

    >>> import torch
    >>> residual = PreNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[-1.,  5.]])
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.dropout(branch)


class BranchNorm(Residual):
    """x + dropout(norm(f(x))): the norm is of what the sublayer says alone.

    Source: OLMo 2 (arXiv 2501.00656), section 3.1.

    >>> import torch
    >>> residual = BranchNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[0., 4.]])
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_after = norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.dropout(self.norm_after(branch))


class SandwichNorm(Residual):
    """x + dropout(norm_after(f(norm_before(x)))).

    Source: Gemma 2 (arXiv 2408.00118), section 2.

    >>> import torch
    >>> residual = SandwichNorm(nn.LayerNorm(2), nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[0., 4.]])
    """

    def __init__(self, norm_before: nn.Module, norm_after: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_before, self.norm_after = norm_before, norm_after
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return self.norm_before(x)

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.dropout(self.norm_after(branch))


@dataclass(frozen=True, eq=False)
class BlockCache:
    """Decoding state of a block: the cache of its self-attention, and the projected memory of its cross-attention.

    An immutable value, as `KVCache` is: a step returns a new one.
    """

    attention: Cache
    memory: ProjectedMemory | None = None

    @property
    def nbytes(self) -> int:
        """Allocated bytes of both."""
        return self.attention.nbytes + (0 if self.memory is None else self.memory.nbytes)

    def reorder(self, rows: Tensor) -> BlockCache:
        """The cache for these rows of the batch, in this order; rows may repeat."""
        memory = None if self.memory is None else self.memory.reorder(rows)
        return BlockCache(self.attention.reorder(rows), memory)


@dataclass(frozen=True, eq=False)
class BlockObservation:
    """Result of `TransformerBlock.observe`: the output, and the results of lenses on both attentions.

    attention, cross_attention: `seen[lens]` of each; the second is None for a block without cross-attention.
    """

    output: Tensor
    attention: Observation
    cross_attention: Observation | None = None


class SelfAttention(Protocol):
    """The self-attention layer of a block: any operator with `forward`, `step` and a cache, such as `Attention`.

    The keyword arguments are those of `Attention.forward`. Linear attention fits: its cache is its running sum.
    """

    def __call__(
        self,
        query: Tensor,
        /,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Self-attention of a whole sequence: (batch, length, dim) to the same."""
        ...

    def make_cache(self, max_length: int | None = None) -> Cache:
        """An empty cache for decoding."""
        ...

    def step(
        self,
        query: Tensor,
        cache: Any,
        /,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, Any]:
        """One decoding step: the output for the next tokens, and the cache extended by them."""
        ...

    def observe(self, query: Tensor, /, *lenses: Lens, **call: Any) -> Observation:
        """`__call__` with lenses on the weights."""
        ...

    def observe_step(self, query: Tensor, cache: Any, /, *lenses: Lens, **call: Any) -> tuple[Observation, Any]:
        """`step` with lenses on the weights."""
        ...


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention if there is one, and a feed-forward network, each in a residual connection.

    With self-attention alone it is an encoder block, or with a causal mask the block of a decoder-only language model;
    with cross-attention it is the decoder block of an encoder-decoder.

    Shapes: x (batch, length, dim), memory (batch, N, memory dim), output (batch, length, dim).

    Args:
        attention: self-attention, such as `Attention` or `LatentAttention`, or any module with the methods of
            `SelfAttention`.
        feed_forward: any module of (batch, length, dim) to the same, such as `FeedForward`, `GatedFeedForward`.
        residual: called once for each sublayer, such as `lambda: PreNorm(RMSNorm(512), dropout=0.1)`.
        cross_attention: attention to a memory, such as the output of an encoder.

    Raises:
        ConfigurationError: `residual` returns no `Residual`.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.

    >>> import torch, regard
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections, TransformerBlock
    >>> block = TransformerBlock(
    ...     Attention(Projections(8, num_heads=2), mask=regard.masks.causal()),
    ...     FeedForward(8, 32),
    ...     lambda: PostNorm(nn.LayerNorm(8)),
    ...     cross_attention=Attention(Projections(8, num_heads=2)),
    ... )
    >>> x, memory = torch.randn(1, 3, 8), torch.randn(1, 5, 8)
    >>> first, cache = block.step(x[:, :2], block.make_cache(memory))
    >>> last, cache = block.step(x[:, 2:], cache)
    >>> torch.allclose(torch.cat([first, last], 1), block(x, memory), atol=1e-6)
    True
    """

    def __init__(
        self,
        attention: SelfAttention,
        feed_forward: nn.Module,
        residual: Callable[[], Residual],
        *,
        cross_attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = _new_residual(residual)
        self.cross_attention = cross_attention
        self.cross_residual = None if cross_attention is None else _new_residual(residual)
        self.feed_forward = feed_forward
        self.feed_forward_residual = _new_residual(residual)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | ProjectedMemory | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        rotation: Rotation | None = None,
        keys: ProjectedMemory | None = None,
        selection: KeySelection | None = None,
    ) -> Tensor:
        """The block applied to a whole sequence.

        Args:
            x: (batch, length, dim).
            memory: (batch, N, memory dim) for cross-attention, or the result of `cross_attention.project_memory`.
            mask: of the self-attention, intersected with its own.
            bias: of the self-attention, added to its own.
            positions: of x, (length,) or (batch, length); 0..length-1 by default.
            memory_mask: of the cross-attention, intersected with its own.
            rotation: of the self-attention, as in `Attention.forward`.
            keys: of the self-attention, in place of its own, as in `Attention.forward`: what `project_keys` of this or
                another block returned, or what a cache holds.
            selection: of the self-attention, as in `LatentAttention.forward`.

        Raises:
            ShapeError: a memory is missing, or the block has no cross-attention for it; tensors that do not fit.
            ConfigurationError: keys for self-attention that is no `Attention`.
        """
        self._check_memory(memory)
        call: dict[str, Any] = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}

        def attend(h: Tensor) -> Tensor:
            if keys is not None:
                return self._sharing_attention()(h, keys=keys, **call)
            return self.attention(h, **call, **_of_selection(selection))

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            return cross(h, memory, mask=memory_mask, positions=positions)

        return self._apply_sublayers(x, attend, cross_attend)

    def observe(
        self,
        x: Tensor,
        *lenses: Lens,
        memory: Tensor | ProjectedMemory | None = None,
        memory_mask: Mask | Tensor | None = None,
        **call: Unpack[SharedCallKwargs],
    ) -> BlockObservation:
        """`forward` with lenses on the weights of both attentions."""
        self._check_memory(memory)
        attention = self.attention if call.get("keys") is None else self._sharing_attention()
        seen: list[Observation] = []

        def attend(h: Tensor) -> Tensor:
            seen.append(attention.observe(h, *lenses, **call))
            return seen[-1].output

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            positions = call.get("positions")
            seen.append(cross.observe(h, *lenses, memory=memory, mask=memory_mask, positions=positions))
            return seen[-1].output

        return BlockObservation(self._apply_sublayers(x, attend, cross_attend), *seen)

    def project_keys(
        self, x: Tensor, *, positions: Tensor | None = None, rotation: Rotation | None = None
    ) -> ProjectedMemory:
        """Keys and values of the self-attention for x, the `keys=` of this block and of others that share them.

        Shapes: x (batch, length, dim), positions (length,) or (batch, length); 0..length-1 by default.

        Raises:
            ConfigurationError: self-attention that is no `Attention`, or has no keys of its own.
        """
        return self._sharing_attention().project_memory(self.attention_residual.before(x), positions, rotation=rotation)

    def extend_cache(
        self, x: Tensor, cache: BlockCache, *, positions: Tensor | None = None, rotation: Rotation | None = None
    ) -> BlockCache:
        """The cache with the keys and values of the next tokens x, as `Attention.extend`: nothing is evicted.

        Raises:
            ConfigurationError: as `project_keys` and `step`.
        """
        self._check_cache(cache)
        attention, store = self._sharing_attention(), cast(Any, cache.attention)
        extended = attention.extend(self.attention_residual.before(x), store, positions=positions, rotation=rotation)
        return replace(cache, attention=extended)

    def make_cache(
        self, memory: Tensor | None = None, *, memory_positions: Tensor | None = None, max_length: int | None = None
    ) -> BlockCache:
        """An empty cache for decoding, with the projected memory; `max_length` as in `KVCache.rolling`."""
        self._check_memory(memory)
        cache = self.attention.make_cache(max_length)
        if self.cross_attention is None or memory is None:
            return BlockCache(cache)
        return BlockCache(cache, self.cross_attention.project_memory(memory, memory_positions))

    def step(
        self,
        x: Tensor,
        cache: BlockCache,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        rotation: Rotation | None = None,
        selection: KeySelection | None = None,
    ) -> tuple[Tensor, BlockCache]:
        """One decoding step: the output for the next tokens, and the extended cache; arguments are those of `forward`.

        Where the memory has fewer rows than x, each of its rows is that of as many consecutive rows of x, as of the
        beams of one sentence: it is attended to as it is, and never repeated.

        Raises:
            ConfigurationError: a cache of another kind, or without the memory that the block needs.
        """
        self._check_cache(cache)
        after: list[Cache] = []

        def attend(h: Tensor) -> Tensor:
            call: dict[str, Any] = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
            output, extended = self.attention.step(h, cache.attention, **call, **_of_selection(selection))
            after.append(extended)
            return output

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            at = cache.attention.next_positions(x.shape[1], x.device) if positions is None else positions
            query, at = _as_memory_rows(h, at, cache.memory)
            return cross(query, cache.memory, mask=memory_mask, positions=at).view_as(h)

        output = self._apply_sublayers(x, attend, cross_attend)
        return output, replace(cache, attention=after[0])

    def observe_step(
        self,
        x: Tensor,
        cache: BlockCache,
        *lenses: Lens,
        memory_mask: Mask | Tensor | None = None,
        **call: Unpack[CallKwargs],
    ) -> tuple[BlockObservation, BlockCache]:
        """`step` with lenses on the weights of both attentions.

        Rows of x that share a row of the memory are queries of that row in the results for the cross-attention.
        """
        self._check_cache(cache)
        at = call.get("positions")
        at = cache.attention.next_positions(x.shape[1], x.device) if at is None else at
        seen: list[Observation] = []
        after: list[Cache] = []

        def attend(h: Tensor) -> Tensor:
            result, extended = self.attention.observe_step(h, cache.attention, *lenses, **call)
            seen.append(result)
            after.append(extended)
            return result.output

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            query, places = _as_memory_rows(h, at, cache.memory)
            seen.append(cross.observe(query, *lenses, memory=cache.memory, mask=memory_mask, positions=places))
            return seen[-1].output.view_as(h)

        output = self._apply_sublayers(x, attend, cross_attend)
        return BlockObservation(output, *seen), replace(cache, attention=after[0])

    def _apply_sublayers(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], cross_attend: Callable[[Attention, Tensor], Tensor]
    ) -> Tensor:
        """Each sublayer in its residual connection, with the given functions for the two attentions."""
        x = self.attention_residual.after(x, attend(self.attention_residual.before(x)))
        if self.cross_attention is not None and self.cross_residual is not None:
            x = self.cross_residual.after(x, cross_attend(self.cross_attention, self.cross_residual.before(x)))
        return self.feed_forward_residual.after(x, self.feed_forward(self.feed_forward_residual.before(x)))

    def _sharing_attention(self) -> Attention:
        """The self-attention, if its keys can be shared.

        Raises:
            ConfigurationError: it is no `Attention`.
        """
        if not isinstance(self.attention, Attention):
            raise ConfigurationError(
                f"the self-attention of this block is a {type(self.attention).__name__}, which has no keys and values "
                "that layers can share: they need a regard.nn.Attention"
            )
        return self.attention

    def _check_memory(self, memory: Tensor | ProjectedMemory | None) -> None:
        if (memory is None) != (self.cross_attention is None):
            raise ShapeError(
                "the block has cross-attention, and got no memory: pass memory=, the output of an encoder"
                if memory is None
                else "the block got a memory, but it has no cross-attention: make it with cross_attention="
            )

    def _check_cache(self, cache: object) -> None:
        if not isinstance(cache, BlockCache):
            raise ConfigurationError(
                f"step needs a BlockCache, as block.make_cache() returns; it got a {type(cache).__name__}"
            )
        if (cache.memory is None) != (self.cross_attention is None):
            raise ConfigurationError(
                "the cache has no memory, and the block has cross-attention: start with block.make_cache(memory)"
                if cache.memory is None
                else "the cache has a memory, but the block has no cross-attention: start with block.make_cache()"
            )


def _as_memory_rows(x: Tensor, positions: Tensor, memory: ProjectedMemory | None) -> tuple[Tensor, Tensor]:
    """Rows (batch, M, dim) that share the rows of a memory as queries of these rows, with their positions."""
    rows, batch = (0 if memory is None else len(memory.keys)), len(x)
    if rows in (0, batch) or batch % rows:
        return x, positions
    shared = batch // rows
    positions = positions.repeat(shared) if positions.ndim == 1 else positions.reshape(rows, -1)
    return x.reshape(rows, shared * x.shape[1], x.shape[2]), positions


def _of_selection(selection: KeySelection | None) -> dict[str, Any]:
    """The argument of the self-attention: none without a selection, which not every layer accepts."""
    return {} if selection is None else {"selection": selection}


def _new_residual(make: Callable[[], Residual]) -> Residual:
    if isinstance(make, nn.Module) or not callable(make):
        raise ConfigurationError(
            f"residual is a {type(make).__name__}; a block needs a function that makes a residual for each of its "
            "parts, such as residual=lambda: PreNorm(nn.LayerNorm(dim))"
        )
    residual = make()
    if not isinstance(residual, Residual):
        raise ConfigurationError(
            f"residual makes a {type(residual).__name__}; a block needs a residual for each of its parts, such as "
            "residual=lambda: PreNorm(nn.LayerNorm(dim))"
        )
    return residual
