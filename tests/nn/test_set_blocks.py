"""Blocks of the Set Transformer and the Perceiver are their equations, and do not see an order of the elements."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from regard.errors import ConfigurationError
from regard.lenses import Weights
from regard.masks import padding
from regard.nn import (
    Attention,
    CrossBlock,
    FeedForward,
    InducedSetBlock,
    PerceiverEncoder,
    PooledSet,
    PostNorm,
    PreNorm,
    Projections,
    TransformerBlock,
)

BATCH, ELEMENTS, POINTS, DIM, HEADS, INPUT = 3, 37, 5, 14, 2, 11
LENGTHS = torch.tensor([37, 13, 1])


def block(norm: Any = PostNorm, memory_dim: int = DIM) -> CrossBlock:
    attention = Attention(Projections(DIM, HEADS, memory_dim=memory_dim))
    return CrossBlock(attention, FeedForward(DIM, 23), norm(nn.LayerNorm(DIM)), norm(nn.LayerNorm(DIM)))


def induced() -> InducedSetBlock:
    return InducedSetBlock(POINTS, DIM, gather=block(), spread=block())


def pooled(seeds: int = 3) -> PooledSet:
    return PooledSet(seeds, DIM, block=block(), feed_forward=FeedForward(DIM, 23))


def perceiver(stages: int = 2) -> PerceiverEncoder:
    def stage():
        own = TransformerBlock(
            Attention(Projections(DIM, HEADS)), FeedForward(DIM, 23), lambda: PreNorm(nn.LayerNorm(DIM))
        )
        return block(PreNorm, INPUT), [own]

    return PerceiverEncoder(POINTS, DIM, [stage() for _ in range(stages)])


def attended(layer: Attention, x: torch.Tensor, memory: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """concat_h(softmax(q·k/√d) v) W_o."""
    projections = layer.projections
    query, key, value = (
        linear(of).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for linear, of in ((projections.query, x), (projections.key, memory), (projections.value, memory))
    )
    scores = query @ key.mT / (DIM // HEADS) ** 0.5
    if lengths is not None:
        scores = scores.masked_fill(torch.arange(memory.shape[1]) >= lengths[:, None, None, None], -torch.inf)
    return projections.output((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def mab(layer: CrossBlock, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """LayerNorm(H + rFF(H)), H = LayerNorm(X + Multihead(X, Y, Y)); the norms of new layers are the plain ones."""
    h = layer_norm(x + attended(layer.attention, x, y, lengths), (DIM,))
    return layer_norm(h + layer.feed_forward(h), (DIM,))


def elements(dim: int = DIM) -> torch.Tensor:
    return torch.randn(BATCH, ELEMENTS, dim, dtype=torch.float64)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
def test_the_blocks_of_the_set_transformer_are_their_equations(lengths):
    x, mask = elements(), None if lengths is None else padding(lengths=lengths)
    isab, pma = induced().double(), pooled().double()
    points, seeds = (of.expand(BATCH, -1, -1) for of in (isab.points, pma.seeds))
    expected = mab(isab.spread, x, mab(isab.gather, points, x, lengths))
    torch.testing.assert_close(isab(x, mask=mask), expected, rtol=1e-11, atol=1e-12)
    expected = mab(pma.block, seeds, pma.feed_forward(x), lengths)
    torch.testing.assert_close(pma(x, mask=mask), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["whole", "padded"])
def test_the_perceiver_is_its_equations(lengths):
    inputs, encoder = elements(INPUT), perceiver().double()
    x = encoder.latents.expand(BATCH, -1, -1)
    stages: Any = encoder.stages
    for cross, own in stages:
        x = x + attended(cross.attention, layer_norm(x, (DIM,)), inputs, lengths)
        x = x + cross.feed_forward(layer_norm(x, (DIM,)))
        h = layer_norm(x, (DIM,))
        x = x + attended(own.attention, h, h, None)
        x = x + own.feed_forward(layer_norm(x, (DIM,)))
    mask = None if lengths is None else padding(lengths=lengths)
    torch.testing.assert_close(encoder(inputs, mask=mask), x, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("make", [induced, pooled, perceiver])
def test_gradients_are_the_numerical_ones(make):
    layer = make().double()
    x = torch.randn(1, 7, INPUT if make is perceiver else DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda of: layer(of).square().sum(), x)
    layer(x).square().sum().backward()
    assert all(one.grad is not None and bool(one.grad.isfinite().all()) for one in layer.parameters())


def test_the_order_of_the_elements_is_that_of_the_output_or_none():
    order = torch.randperm(ELEMENTS)
    for layer, dim in ((induced(), DIM), (pooled(), DIM), (perceiver(), INPUT)):
        x = elements(dim)
        layer.double()
        whole, permuted = layer(x), layer(x[:, order])
        expected = whole[:, order] if isinstance(layer, InducedSetBlock) else whole
        torch.testing.assert_close(permuted, expected)


def test_what_is_behind_the_end_of_a_set_reaches_nothing():
    absent = torch.arange(ELEMENTS) >= LENGTHS[:, None]
    for layer, dim in ((induced(), DIM), (pooled(), DIM), (perceiver(), INPUT)):
        layer.double()
        x, mask = elements(dim), padding(lengths=LENGTHS)
        other = x.masked_fill(absent[..., None], 1e3)
        ours, theirs = layer(x, mask=mask), layer(other, mask=mask)
        there = ~absent if isinstance(layer, InducedSetBlock) else ...
        torch.testing.assert_close(ours[there], theirs[there])


def test_weights_of_seeds_can_be_looked_at():
    layer, x, lens = pooled().double(), elements(), Weights()
    seen = layer.observe(x, lens, mask=padding(lengths=LENGTHS))
    torch.testing.assert_close(seen.output, layer(x, mask=padding(lengths=LENGTHS)))
    weights = seen.attention[lens]
    assert weights.shape == (BATCH, HEADS, 3, ELEMENTS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, 3, dtype=torch.float64))
    assert not weights[1, ..., 13:].any()


def test_a_stage_that_is_given_twice_has_its_weights_once():
    cross = block(PreNorm, INPUT)
    own = TransformerBlock(Attention(Projections(DIM, HEADS)), FeedForward(DIM, 23), lambda: PreNorm(nn.LayerNorm(DIM)))
    one, two = (PerceiverEncoder(POINTS, DIM, [(cross, [own])] * count) for count in (1, 2))
    assert len(list(one.parameters())) == len(list(two.parameters()))
    x = torch.randn(2, 5, INPUT)
    assert not torch.allclose(one(x), two(x))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigurationError, match="points is 0; it needs at least 1"):
        InducedSetBlock(0, DIM, gather=block(), spread=block())
    with pytest.raises(ConfigurationError, match="seeds is -1; it needs"):
        PooledSet(-1, DIM, block=block(), feed_forward=nn.Identity())
    with pytest.raises(ConfigurationError, match="latents is 0; it needs"):
        PerceiverEncoder(0, DIM, [(block(), [])])
    with pytest.raises(ConfigurationError, match="stages has none; a Perceiver needs at least one CrossBlock"):
        PerceiverEncoder(4, DIM, [])
    wrong: Any = [(block(), [block()])]
    with pytest.raises(
        ConfigurationError, match="TransformerBlocks without cross-attention behind it; one has CrossBl"
    ):
        PerceiverEncoder(4, DIM, wrong)
    norm: Any = nn.LayerNorm(DIM)
    with pytest.raises(ConfigurationError, match="attention_residual is a LayerNorm; it needs to be a residual, such"):
        CrossBlock(Attention(Projections(DIM, HEADS)), FeedForward(DIM, 23), norm, norm)
