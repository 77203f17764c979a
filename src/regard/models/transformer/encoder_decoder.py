"""Stacks of Transformer blocks, the encoder and the decoder, and the token embeddings before and after them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...attention import Observation
from ...errors import ConfigurationError
from ...lenses import Lens
from ...masks import Mask
from ...nn import BlockCache, BlockObservation, Cache, ProjectedMemory, TransformerBlock
from ...nn.linear import linear
from ...positions import Learned


class Encoder(nn.Module):
    """x_n = block_n(x_{n-1}), and a norm at the end where there is one: [B, S, dim] to [B, S, dim].

    Args:
        blocks: blocks without cross-attention.
        norm: of the last block's output; blocks with `PreNorm` need one, blocks with `PostNorm` have theirs.

    Raises:
        ConfigurationError: no block, or one that attends to a memory.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def __init__(self, blocks: Iterable[TransformerBlock], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_checked(blocks, memory=False))
        self.norm = nn.Identity() if norm is None else norm

    def forward(self, x: Tensor, mask: Mask | None = None) -> Tensor:
        """The output of all blocks; the mask selects the positions that exist."""
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.norm(x)

    def observe(
        self, x: Tensor, *lenses: Lens, mask: Mask | None = None
    ) -> tuple[Tensor, tuple[BlockObservation, ...]]:
        """`forward`, and the lenses' results for each block."""
        seen = []
        for block in self.blocks:
            seen.append(block.observe(x, *lenses, mask=mask))  # type: ignore[operator]
            x = seen[-1].output
        return self.norm(x), tuple(seen)


class Decoder(nn.Module):
    """x_n = block_n(x_{n-1}, memory) with cross-attention to a memory: [B, T, dim] to [B, T, dim].

    The blocks' own attention needs a causal mask, `Attention(..., mask=causal())`: a stack gives them none.

    Args:
        blocks: blocks with cross-attention.
        norm: of the last block's output, as for `Encoder`.

    Raises:
        ConfigurationError: no block, one without cross-attention, or one whose attention has no mask.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.1.
    """

    def __init__(self, blocks: Iterable[TransformerBlock], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_checked(blocks, memory=True))
        self.norm = nn.Identity() if norm is None else norm

    def project_memory(self, memory: Tensor) -> tuple[ProjectedMemory, ...]:
        """The keys and values of a memory [B, S, dim] for each block, once for all steps."""
        return tuple(block.cross_attention.project_memory(memory) for block in self._blocks)  # type: ignore[union-attr]

    def make_caches(self) -> tuple[Cache, ...]:
        """An empty cache of the target for each block."""
        return tuple(block.attention.make_cache() for block in self._blocks)

    def forward(self, x: Tensor, memory: tuple[ProjectedMemory, ...], mask: Mask | None = None) -> Tensor:
        """A whole target; `memory` comes from `project_memory`, and the mask selects its positions that exist."""
        for block, projected in zip(self._blocks, memory, strict=True):
            x = block(x, projected, memory_mask=mask)
        return self.norm(x)

    def observe(
        self, x: Tensor, memory: tuple[ProjectedMemory, ...], *lenses: Lens, mask: Mask | None = None
    ) -> tuple[Tensor, tuple[BlockObservation, ...]]:
        """`forward`, and the lenses' results for each block."""
        seen = []
        for block, projected in zip(self._blocks, memory, strict=True):
            seen.append(block.observe(x, *lenses, memory=projected, memory_mask=mask))
            x = seen[-1].output
        return self.norm(x), tuple(seen)

    def observe_layer(
        self, layer: int, x: Tensor, memory: tuple[ProjectedMemory, ...], *lenses: Lens, mask: Mask | None = None
    ) -> tuple[Tensor, Observation]:
        """`forward`, and the lenses' results for the cross-attention of one block."""
        seen = None
        for number, (block, projected) in enumerate(zip(self._blocks, memory, strict=True)):
            if number == layer:
                looked = block.observe(x, *lenses, memory=projected, memory_mask=mask)
                x, seen = looked.output, looked.cross_attention
            else:
                x = block(x, projected, memory_mask=mask)
        if seen is None:
            raise ConfigurationError(f"there is no layer {layer} of {len(self.blocks)}: they are counted from 0")
        return self.norm(x), seen

    def step(
        self, x: Tensor, caches: tuple[Cache, ...], memory: tuple[ProjectedMemory, ...], mask: Mask | None = None
    ) -> tuple[Tensor, tuple[Cache, ...]]:
        """The output for the next tokens, and the caches with their keys and values appended."""
        after = []
        for block, cache, projected in zip(self._blocks, caches, memory, strict=True):
            x, grown = block.step(x, BlockCache(cache, projected), memory_mask=mask)
            after.append(grown.attention)
        return self.norm(x), tuple(after)

    def observe_step(
        self,
        x: Tensor,
        caches: tuple[Cache, ...],
        memory: tuple[ProjectedMemory, ...],
        *lenses: Lens,
        mask: Mask | None = None,
    ) -> tuple[Tensor, tuple[BlockObservation, ...], tuple[Cache, ...]]:
        """`step`, and the lenses' results for each block."""
        seen, after = [], []
        for block, cache, projected in zip(self._blocks, caches, memory, strict=True):
            looked, grown = block.observe_step(x, BlockCache(cache, projected), *lenses, memory_mask=mask)
            x = looked.output
            seen.append(looked)
            after.append(grown.attention)
        return self.norm(x), tuple(seen), tuple(after)

    @property
    def num_heads(self) -> int:
        """Heads of the cross-attention of each block."""
        return self._blocks[0].cross_attention.projections.num_heads  # type: ignore[union-attr]

    @property
    def _blocks(self) -> list[TransformerBlock]:
        return list(self.blocks)  # type: ignore[arg-type]


def _checked(blocks: Iterable[TransformerBlock], *, memory: bool) -> list[TransformerBlock]:
    """Check that the blocks fit the stack."""
    blocks, name = list(blocks), "a decoder" if memory else "an encoder"
    if not blocks:
        raise ConfigurationError(f"{name} has no blocks; it needs at least one TransformerBlock")
    for number, block in enumerate(blocks):
        if not isinstance(block, TransformerBlock):
            raise ConfigurationError(f"block {number} of {name} is a {type(block).__name__}, not a TransformerBlock")
        if (block.cross_attention is not None) != memory:
            raise ConfigurationError(
                f"block {number} of {name} {'has no' if memory else 'has'} cross-attention: make it "
                f"{'with' if memory else 'without'} cross_attention="
            )
        if memory and getattr(block.attention, "mask", None) is None:
            raise ConfigurationError(
                f"the attention of block {number} of {name} has no mask, and would attend to the tokens that it is to "
                "predict: make it with mask=causal()"
            )
    return blocks


class Embedding(nn.Module):
    """dropout(norm(√dim · E[token] + P(position))): tokens [B, T] to vectors [B, T, dim].

    Args:
        tokens: E. One table given to several embeddings, and to `TiedOutput`, is shared by them.
        positions: P, such as `Sinusoidal(dim)` or `Learned(length, dim)`; nothing is added without it, as where
            attention turns by position.
        dropout: the probability with which a feature of the sum is dropped in training.
        scale: what E[token] is multiplied by; √dim without it.
        norm: of the sum, as mBART has one; none without it.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.4, 3.5 and 5.4.

    >>> import torch
    >>> from regard.positions import Sinusoidal
    >>> embedding = Embedding(nn.Embedding.from_pretrained(torch.tensor([[0.0, 1.0]])), Sinusoidal(2))
    >>> embedding(torch.tensor([[0, 0]]))
    tensor([[[0.0000, 2.4142],
             [0.8415, 1.9545]]])
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module | None = None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.tokens = tokens
        self.positions = positions
        self.scale = math.sqrt(tokens.embedding_dim) if scale is None else scale
        self.norm = nn.Identity() if norm is None else norm
        self.dropout = nn.Dropout(dropout)

    @property
    def max_length(self) -> int | None:
        """The number of positions if they are learned; None: any number."""
        return self.positions.length if isinstance(self.positions, Learned) else None

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens, the first of which is at position `first`."""
        embedded = self.tokens(tokens) * self.scale
        if self.positions is not None:
            at = torch.arange(first, first + tokens.shape[-1], device=tokens.device)
            embedded = embedded + self.positions(at).to(embedded.dtype)
        return self.dropout(self.norm(embedded))


class TiedOutput(nn.Module):
    """x Eᵀ + b: logits from the embedding table E, [..., dim] to [..., V].

    Args:
        tokens: E.
        bias: whether there is a bias b, a parameter [V] that starts at 0; the papers have none, Marian's models do.

    Source: Press and Wolf 2017 (arXiv 1608.05859), section 3; Vaswani et al. 2017 (arXiv 1706.03762), section 3.4.

    >>> import torch
    >>> TiedOutput(nn.Embedding.from_pretrained(torch.eye(2)))(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """

    def __init__(self, tokens: nn.Embedding, *, bias: bool = False) -> None:
        super().__init__()
        self.tokens = tokens
        self.bias = nn.Parameter(torch.zeros(tokens.num_embeddings)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The embedding table E, [V, dim]."""
        return self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V] of vectors [..., dim]."""
        return linear(x, self.weight, self.bias)
