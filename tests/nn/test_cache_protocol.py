"""The cache protocol: a block decodes with a state of constant size, an attention layer with a store of one's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.errors import ConfigurationError
from regard.nn import Attention, BlockCache, Cache, FeedForward, KVCache, PreNorm, Projections, TransformerBlock

DIM, BATCH, LENGTH = 8, 3, 7


@dataclass(frozen=True, eq=False)
class RunningSum(Cache):
    """S = Σ φ(k) vᵀ and z = Σ φ(k): the state of linear attention, of one size for any number of tokens."""

    matrix: Tensor
    total: Tensor
    next_position: int = 0

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.total.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> RunningSum:
        matrix, total = self.matrix + keys.mT @ values, self.total + keys.sum(-2, keepdim=True)
        return RunningSum(matrix, total, self.next_position + keys.shape[-2])

    def reorder(self, rows: Tensor) -> RunningSum:
        return replace(self, matrix=self.matrix[rows], total=self.total[rows])

    def evict(self) -> RunningSum:
        return self


class CausalLinearAttention(nn.Module):
    """φ(q) S / (φ(q) · z) with φ = elu + 1, causal (Katharopoulos et al. 2020, arXiv 2006.16236, Eqs. 9 to 12)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, 3 * DIM)

    def forward(self, query: Tensor, **call: Any) -> Tensor:
        q, k, v = self._heads(query)
        weights = (q @ k.mT).tril()
        return (weights @ v / weights.sum(-1, keepdim=True)).squeeze(1)

    def make_cache(self, max_length: int | None = None) -> RunningSum:
        return RunningSum(torch.zeros(1, 1, DIM, DIM), torch.zeros(1, 1, 1, DIM))

    def step(self, query: Tensor, cache: RunningSum, **call: Any) -> tuple[Tensor, RunningSum]:
        outputs = []
        for token in query.split(1, dim=1):
            q, k, v = self._heads(token)
            cache = cache.append(k, v)
            outputs.append((q @ cache.matrix / (q * cache.total).sum(-1, keepdim=True)).squeeze(1))
        return torch.cat(outputs, 1), cache.evict()

    def observe(self, query: Tensor, *lenses: Any, **call: Any) -> Any:
        raise NotImplementedError

    def observe_step(self, query: Tensor, cache: RunningSum, *lenses: Any, **call: Any) -> Any:
        raise NotImplementedError

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.project(x).unsqueeze(1).chunk(3, -1)
        return nn.functional.elu(q) + 1, nn.functional.elu(k) + 1, v


@dataclass(frozen=True, eq=False)
class PlainStore(Cache):
    """Keys and values concatenated at every step: the shortest cache that softmax attention can read."""

    keys: Tensor
    values: Tensor
    mask: None = None
    has_default_positions: bool = True

    @property
    def next_position(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.next_position)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> PlainStore:
        return PlainStore(torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2))

    def reorder(self, rows: Tensor) -> PlainStore:
        return PlainStore(self.keys[rows], self.values[rows])

    def evict(self) -> PlainStore:
        return self


def steps(layer: Any, x: Tensor, cache: Any) -> tuple[Tensor, Any]:
    outputs = []
    for chunk in x.split([3, 1, 1, 2], dim=1):
        output, cache = layer.step(chunk, cache)
        outputs.append(output)
    return torch.cat(outputs, 1), cache


def test_a_block_decodes_with_a_state_of_constant_size():
    block = TransformerBlock(CausalLinearAttention(), FeedForward(DIM, 5), lambda: PreNorm(nn.LayerNorm(DIM)))
    x = torch.randn(BATCH, LENGTH, DIM)
    output, cache = steps(block, x, block.make_cache())
    torch.testing.assert_close(output, block(x), atol=1e-5, rtol=1e-5)
    assert isinstance(cache, BlockCache)
    assert cache.attention.next_position == LENGTH
    assert cache.attention.next_positions(2).tolist() == [LENGTH, LENGTH + 1]
    assert cache.nbytes == BATCH * (DIM * DIM + DIM) * 4, "the same for any length"
    rows = torch.tensor([2, 0, 0])
    nexts = torch.randn(BATCH, 1, DIM)
    after, _ = block.step(nexts[rows], cache.reorder(rows))
    torch.testing.assert_close(after, block.step(nexts, cache)[0][rows])


@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & masks.window(before=2)], ids=repr)
def test_attention_decodes_with_a_store_of_keys_and_values(mask):
    layer, x = Attention(Projections(DIM, 2, num_kv_heads=1), mask=mask), torch.randn(BATCH, LENGTH, DIM)
    empty = PlainStore(torch.zeros(BATCH, 1, 0, DIM // 2), torch.zeros(BATCH, 1, 0, DIM // 2))
    output, cache = steps(layer, x, empty)
    assert isinstance(cache, PlainStore)
    torch.testing.assert_close(output, layer(x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(output, steps(layer, x, KVCache())[0])


def test_attention_refuses_a_state_without_keys():
    layer, x = Attention(Projections(DIM, 2), mask=masks.causal()), torch.randn(BATCH, LENGTH, DIM)
    with pytest.raises(ConfigurationError, match="got a RunningSum, which has no has_default_positions, keys, mask"):
        layer.step(x, CausalLinearAttention().make_cache())  # type: ignore[type-var]
