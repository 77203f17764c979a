"""The block of a Transformer: attention, perhaps attention to a memory, and a feed-forward part.

How a block adds what its parts say to what goes through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

from torch import Tensor, nn

from ..attention import Seen
from ..biases import Bias
from ..errors import ConfigurationError, ShapeError
from ..lenses import Lens
from ..masks import Mask
from ..positions import Rotation
from .attention_layer import Attention, Beside
from .caches import KVCache, MemoryCache
from .input_checks import probability
from .latent_attention import LatentAttention


class Residual(nn.Module, ABC):
    """x and a part f become `after(x, f(before(x)))`. A block has one for each of its parts."""

    @abstractmethod
    def before(self, x: Tensor) -> Tensor:
        """What the part is given."""

    @abstractmethod
    def after(self, x: Tensor, said: Tensor) -> Tensor:
        """What goes on, from x and from what the part said."""


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

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return self.norm(x + self.dropout(said))


class PreNorm(Residual):
    """x + dropout(f(norm(x))); a stack of such blocks ends in one more norm.

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

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return x + self.dropout(said)


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

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return x + self.dropout(self.norm_after(said))


@dataclass(frozen=True, eq=False)
class BlockCache:
    """What a block keeps in decoding: the cache of its attention, and the memory of its cross-attention if it has one.

    A value, as `KVCache` is: a step returns another one, and the old one stays as it was.
    """

    attention: KVCache
    memory: MemoryCache | None = None

    @property
    def nbytes(self) -> int:
        """The memory that both take."""
        return self.attention.nbytes + (0 if self.memory is None else self.memory.nbytes)

    def select(self, rows: Tensor) -> BlockCache:
        """The cache of these rows of the batch, in this order; a row may come more than once."""
        memory = None if self.memory is None else self.memory.select(rows)
        return BlockCache(self.attention.select(rows), memory)


@dataclass(frozen=True, eq=False)
class SeenBlock:
    """What a block gives where it is observed: its output, and what lenses show of its attention.

    attention, cross_attention: `seen[lens]` of each; the second is None where the block has no memory.
    """

    output: Tensor
    attention: Seen
    cross_attention: Seen | None = None


class TransformerBlock(nn.Module):
    """Attention, cross-attention if there is one, and the feed-forward part, each in a residual of its own.

    With attention alone it is the block of an encoder, and with a causal mask in its attention that of a language
    model; with cross-attention it is a decoder's.

    Shapes: x (batch, length, dim), memory (batch, N, memory dim), output (batch, length, dim).

    Args:
        attention: of the sequence to itself.
        feed_forward: any module of (batch, length, dim) to the same, such as `FeedForward`, `GatedFeedForward`.
        residual: makes the residual of each part, such as `lambda: PreNorm(RMSNorm(512), dropout=0.1)`.
        cross_attention: of the sequence to a memory.

    Raises:
        ConfigurationError: residual makes no `Residual`.

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
        attention: Attention | LatentAttention,
        feed_forward: nn.Module,
        residual: Callable[[], Residual],
        *,
        cross_attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = _made(residual)
        self.cross_attention = cross_attention
        self.cross_residual = None if cross_attention is None else _made(residual)
        self.feed_forward = feed_forward
        self.feed_forward_residual = _made(residual)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | MemoryCache | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        positions: Tensor | None = None,
        memory_mask: Mask | Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """A whole sequence.

        Args:
            x: (batch, length, dim).
            memory: what cross-attention attends to, or what `cross_attention.remember` made of it.
            mask: of the attention, beside its own.
            bias: of the attention, beside its own.
            positions: of x, (length,) or (batch, length); without them 0..length-1.
            memory_mask: of the cross-attention, beside its own.
            rotation: of the attention, as in `Attention.forward`.

        Raises:
            ShapeError: a memory that is missing, or is given to a block that has no use for it; what does not fit.
        """
        self._check_memory(memory)
        return self._through(
            x,
            lambda h: self.attention(h, mask=mask, bias=bias, positions=positions, rotation=rotation),
            lambda cross, h: cross(h, memory, mask=memory_mask, positions=positions),
        )

    def observe(
        self,
        x: Tensor,
        *lenses: Lens,
        memory: Tensor | MemoryCache | None = None,
        memory_mask: Mask | Tensor | None = None,
        **beside: Unpack[Beside],
    ) -> SeenBlock:
        """`forward`, and what lenses show of both attentions."""
        self._check_memory(memory)
        seen: list[Seen] = []

        def attend(h: Tensor) -> Tensor:
            seen.append(self.attention.observe(h, *lenses, **beside))
            return seen[-1].output

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            positions = beside.get("positions")
            seen.append(cross.observe(h, *lenses, memory=memory, mask=memory_mask, positions=positions))
            return seen[-1].output

        return SeenBlock(self._through(x, attend, cross_attend), *seen)

    def make_cache(
        self, memory: Tensor | None = None, *, memory_positions: Tensor | None = None, max_length: int | None = None
    ) -> BlockCache:
        """An empty cache for decoding, with the memory projected; `max_length` as in `KVCache.rolling`."""
        self._check_memory(memory)
        cache = self.attention.make_cache(max_length)
        if self.cross_attention is None or memory is None:
            return BlockCache(cache)
        return BlockCache(cache, self.cross_attention.remember(memory, memory_positions))

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
    ) -> tuple[Tensor, BlockCache]:
        """The tokens that come next, one or many, and the cache with them in it; arguments are those of `forward`.

        Raises:
            ConfigurationError: a cache of another kind, or without the memory that the block needs.
        """
        self._check_cache(cache)
        at = cache.attention.following(x.shape[1], x.device) if positions is None else positions
        after: list[KVCache] = []

        def attend(h: Tensor) -> Tensor:
            beside: Beside = {"mask": mask, "bias": bias, "positions": positions, "rotation": rotation}
            said, grown = self.attention.step(h, cache.attention, **beside)
            after.append(grown)
            return said

        output = self._through(x, attend, lambda cross, h: cross(h, cache.memory, mask=memory_mask, positions=at))
        return output, replace(cache, attention=after[0])

    def observe_step(
        self,
        x: Tensor,
        cache: BlockCache,
        *lenses: Lens,
        memory_mask: Mask | Tensor | None = None,
        **beside: Unpack[Beside],
    ) -> tuple[SeenBlock, BlockCache]:
        """`step`, and what lenses show of both attentions."""
        self._check_cache(cache)
        at = beside.get("positions")
        at = cache.attention.following(x.shape[1], x.device) if at is None else at
        seen: list[Seen] = []
        after: list[KVCache] = []

        def attend(h: Tensor) -> Tensor:
            looked, grown = self.attention.observe_step(h, cache.attention, *lenses, **beside)
            seen.append(looked)
            after.append(grown)
            return looked.output

        def cross_attend(cross: Attention, h: Tensor) -> Tensor:
            seen.append(cross.observe(h, *lenses, memory=cache.memory, mask=memory_mask, positions=at))
            return seen[-1].output

        return SeenBlock(self._through(x, attend, cross_attend), *seen), replace(cache, attention=after[0])

    def _through(
        self, x: Tensor, attend: Callable[[Tensor], Tensor], cross_attend: Callable[[Attention, Tensor], Tensor]
    ) -> Tensor:
        """The sequence through each part and its residual."""
        x = self.attention_residual.after(x, attend(self.attention_residual.before(x)))
        if self.cross_attention is not None and self.cross_residual is not None:
            x = self.cross_residual.after(x, cross_attend(self.cross_attention, self.cross_residual.before(x)))
        said = self.feed_forward(self.feed_forward_residual.before(x))
        return self.feed_forward_residual.after(x, said)

    def _check_memory(self, memory: Tensor | MemoryCache | None) -> None:
        if (memory is None) != (self.cross_attention is None):
            raise ShapeError(
                "the block attends to a memory, and was given none: give memory=, what an encoder put out"
                if memory is None
                else "the block was given a memory, but it has no cross-attention: make it with cross_attention="
            )

    def _check_cache(self, cache: object) -> None:
        if not isinstance(cache, BlockCache):
            raise ConfigurationError(
                f"step needs a BlockCache, as block.make_cache() gives; it was given a {type(cache).__name__}"
            )
        if (cache.memory is None) != (self.cross_attention is None):
            raise ConfigurationError(
                "the cache has no memory, and the block attends to one: start with block.make_cache(memory)"
                if cache.memory is None
                else "the cache has a memory, but the block has no cross-attention: start with block.make_cache()"
            )


def _made(residual: Callable[[], Residual]) -> Residual:
    made = residual()
    if not isinstance(made, Residual):
        raise ConfigurationError(
            f"residual makes a {type(made).__name__}; a block needs a residual for each of its parts, such as "
            "residual=lambda: PreNorm(nn.LayerNorm(dim))"
        )
    return made
