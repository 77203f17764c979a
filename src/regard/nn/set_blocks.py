"""Blocks that read a set through a few learned vectors, as the Set Transformer and the Perceiver do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError
from ..lenses import Lens
from ..masks import Mask
from ..utils.numbers import whole_number
from .attention_layer import Attention, CallKwargs
from .transformer_block import BlockObservation, Residual, TransformerBlock


class CrossBlock(nn.Module):
    """h = x + Attention(x, memory), then h + FeedForward(h): x reads another sequence and not itself.

    With `PostNorm` it is the multihead attention block of the Set Transformer, MAB(X, Y) = LayerNorm(H + rFF(H)) with
    H = LayerNorm(X + Multihead(X, Y, Y)). With `PreNorm` it is the cross-attention of the Perceiver, which normalises
    the memory too: give it a normalised one.

    Shapes: x (batch, M, dim), memory (batch, N, memory_dim); the output is (batch, M, dim).

    Args:
        attention: of x to the memory.
        feed_forward: (batch, M, dim) to (batch, M, dim).
        attention_residual: around the attention, such as `PostNorm(nn.LayerNorm(dim))`.
        feed_forward_residual: around the feed-forward layer, another one.

    Source: Lee et al. 2019 (arXiv 1810.00825), Eq. 6 and 7; Jaegle et al. 2021 (arXiv 2103.03206), section 3.1.

    >>> import torch
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections
    >>> parts = Attention(Projections(8, 2)), FeedForward(8, 16), PostNorm(nn.LayerNorm(8)), PostNorm(nn.LayerNorm(8))
    >>> CrossBlock(*parts)(torch.zeros(1, 3, 8), torch.zeros(1, 7, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        attention: Attention,
        feed_forward: nn.Module,
        attention_residual: Residual,
        feed_forward_residual: Residual,
    ) -> None:
        super().__init__()
        for name, residual in (
            ("attention_residual", attention_residual),
            ("feed_forward_residual", feed_forward_residual),
        ):
            if not isinstance(residual, Residual):
                raise ConfigurationError(
                    f"{name} is a {type(residual).__name__}; it needs to be a residual, such as "
                    "PostNorm(nn.LayerNorm(dim))"
                )
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_residual, self.feed_forward_residual = attention_residual, feed_forward_residual

    def forward(self, x: Tensor, memory: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """The block; `mask` says which of the memory each row of x attends to, such as `padding(lengths=...)`.

        Raises:
            ShapeError, DtypeError, DeviceError, MaskError: as `Attention.forward`.
        """
        h = self.attention_residual.before(x)
        return self._finish(x, self.attention(h, memory, mask=mask))

    def observe(self, x: Tensor, *lenses: Lens, memory: Tensor, **call: Unpack[CallKwargs]) -> BlockObservation:
        """`forward`, with lenses on its weights: `seen.output`, `seen.attention[lens]`."""
        seen = self.attention.observe(self.attention_residual.before(x), *lenses, memory=memory, **call)
        return BlockObservation(self._finish(x, seen.output), seen)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.attention_residual.after(x, attended)
        return self.feed_forward_residual.after(x, self.feed_forward(self.feed_forward_residual.before(x)))


class InducedSetBlock(nn.Module):
    """ISAB_m(X) = MAB(X, H) with H = MAB(I, X): all of a set through m learned points I, in n·m scores for n².

    What is permuted in X is permuted alike in the output.

    Shapes: x (batch, n, dim) to (batch, n, dim); the points (m, dim) start Xavier uniform.

    Args:
        points: m.
        dim: of x.
        gather: MAB(I, X), from the set to the points.
        spread: MAB(X, H), from the points to the set.

    Raises:
        ConfigurationError: points or a dim below 1.

    Source: Lee et al. 2019 (arXiv 1810.00825), Eq. 9 and 10.

    >>> import torch
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections
    >>> def block():
    ...     norms = (PostNorm(nn.LayerNorm(8)) for _ in range(2))
    ...     return CrossBlock(Attention(Projections(8, 2)), FeedForward(8, 16), *norms)
    >>> InducedSetBlock(4, 8, gather=block(), spread=block())(torch.zeros(2, 37, 8)).shape
    torch.Size([2, 37, 8])
    """

    def __init__(self, points: int, dim: int, *, gather: CrossBlock, spread: CrossBlock) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(whole_number("points", points), whole_number("dim", dim)))
        nn.init.xavier_uniform_(self.points)
        self.gather, self.spread = gather, spread

    def forward(self, x: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """The block; `mask` selects the elements that exist, such as `padding(lengths=...)`."""
        return self.spread(x, self.gather(_each(self.points, x), x, mask=mask))


class PooledSet(nn.Module):
    """PMA_k(Z) = MAB(S, rFF(Z)): k learned seeds S read a set, whatever the order of its elements.

    Shapes: z (batch, n, dim) to (batch, k, dim); the seeds (k, dim) start Xavier uniform.

    Args:
        seeds: k, the number of vectors that come out.
        dim: of a seed.
        block: MAB.
        feed_forward: rFF, of each element; nn.Identity() for none.

    Raises:
        ConfigurationError: seeds or a dim below 1.

    Source: Lee et al. 2019 (arXiv 1810.00825), Eq. 11.

    >>> import torch
    >>> from regard.nn import Attention, FeedForward, PostNorm, Projections
    >>> norms = (PostNorm(nn.LayerNorm(8)) for _ in range(2))
    >>> block = CrossBlock(Attention(Projections(8, 2)), FeedForward(8, 16), *norms)
    >>> PooledSet(1, 8, block=block, feed_forward=FeedForward(8, 16))(torch.zeros(2, 37, 8)).shape
    torch.Size([2, 1, 8])
    """

    def __init__(self, seeds: int, dim: int, *, block: CrossBlock, feed_forward: nn.Module) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.empty(whole_number("seeds", seeds), whole_number("dim", dim)))
        nn.init.xavier_uniform_(self.seeds)
        self.block, self.feed_forward = block, feed_forward

    def forward(self, z: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """The pooled vectors; `mask` selects the elements that exist."""
        return self.block(_each(self.seeds, z), self.feed_forward(z), mask=mask)

    def observe(self, z: Tensor, *lenses: Lens, mask: Mask | Tensor | None = None) -> BlockObservation:
        """`forward`, with lenses on the weights of the seeds over the elements, (batch, heads, k, n)."""
        return self.block.observe(_each(self.seeds, z), *lenses, memory=self.feed_forward(z), mask=mask)


class PerceiverEncoder(nn.Module):
    """A learned array of latents reads the input, and itself, in turns: x = cross(x, input), then x = block(x) of each.

    Attention costs latents · n for the input and latents² for the blocks, whatever the depth. A stage that is given
    twice has its weights shared, as all but the first are in the paper.

    Shapes: inputs (batch, n, input dim) to (batch, latents, dim); the latents start as normal numbers of deviation
    0.02, cut off at 2.

    Args:
        latents: number of them.
        dim: of a latent.
        stages: of each a `CrossBlock`, and the `TransformerBlock`s behind it.

    Raises:
        ConfigurationError: latents or a dim below 1; no stage, or a block with cross-attention.

    Source: Jaegle et al. 2021 (arXiv 2103.03206), section 3.1 and appendix C.

    >>> import torch
    >>> from regard.nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
    >>> def norm():
    ...     return PreNorm(nn.LayerNorm(8))
    >>> cross = CrossBlock(Attention(Projections(8, 1, memory_dim=3)), FeedForward(8, 16), norm(), norm())
    >>> block = TransformerBlock(Attention(Projections(8, 2)), FeedForward(8, 16), norm)
    >>> encoder = PerceiverEncoder(5, 8, [(cross, [block])] * 2)  # two stages with the same weights
    >>> encoder(torch.zeros(2, 997, 3)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, latents: int, dim: int, stages: Iterable[tuple[CrossBlock, Sequence[TransformerBlock]]]) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.empty(whole_number("latents", latents), whole_number("dim", dim)))
        nn.init.trunc_normal_(self.latents, std=0.02, a=-2.0, b=2.0)
        self.stages = nn.ModuleList(nn.ModuleList([cross, *blocks]) for cross, blocks in stages)
        if not len(self.stages):
            raise ConfigurationError("stages has none; a Perceiver needs at least one CrossBlock that reads the input")
        for stage in self.stages:
            first, *others = stage.children()
            if not isinstance(first, CrossBlock) or not all(_reads_itself(block) for block in others):
                raise ConfigurationError(
                    "each of stages needs a CrossBlock, and TransformerBlocks without cross-attention behind it; one "
                    f"has {', '.join(type(block).__name__ for block in stage.children())}"
                )

    def forward(self, inputs: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
        """The latents after all stages; `mask` selects the inputs that exist, such as `padding(lengths=...)`."""
        x = _each(self.latents, inputs)
        for stage in self.stages:
            cross, *blocks = stage.children()
            x = cross(x, inputs, mask=mask)
            for block in blocks:
                x = block(x)
        return x


def _reads_itself(block: nn.Module) -> bool:
    return isinstance(block, TransformerBlock) and block.cross_attention is None


def _each(vectors: Tensor, of: Tensor) -> Tensor:
    """Learned vectors (k, dim) for each sequence of a batch, (batch, k, dim)."""
    return vectors.expand(len(of), -1, -1)
