"""The indexer and the layer whose keys it chooses: as their formula, in steps as in one, with masks and lenses."""

import copy
import re
from typing import Any, cast

import pytest
import torch
from torch import nn

from regard import biases, masks
from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Weights
from regard.masks import Mask
from regard.nn import (
    Attention,
    EarlierIndexer,
    KeySelection,
    KVCache,
    LatentAttention,
    LatentProjections,
    LightningIndexer,
    Projections,
)
from regard.positions import Rotary
from regard.positions.rotary import Layout

DIM, LATENT, BATCH, LENGTH, COUNT = 12, 7, 3, 37, 5
CAUSAL = masks.causal()


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def sparse(mask: Mask | None = CAUSAL, *, count: int = COUNT, layout: Layout = "half", **options) -> LatentAttention:
    projections = LatentProjections(
        DIM, 4, latent_dim=5, rotary_dim=4, head_dim=3, value_dim=11, query_latent_dim=LATENT
    )
    indexer = LightningIndexer(DIM, LATENT, num_heads=6, head_dim=9, count=count, layout=layout)
    layer = LatentAttention(projections, Rotary(4, layout="interleaved"), indexer=indexer, mask=mask, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double()


def dense_of(layer: LatentAttention) -> LatentAttention:
    """The same layer without its indexer."""
    dense = LatentAttention(layer.projections, layer.rotary, mask=layer.mask, scale=layer.scale)
    return dense.double()


def text(batch: int = BATCH, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(batch, length, DIM).double()


def scores_by_hand(layer: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """I(t, s) of the report, pair by pair: (batch, length, length)."""
    made, indexer = layer.projections, cast(Any, layer.indexer)
    assert made.query_down is not None
    turn = Rotary(4, layout=indexer.layout)
    latent = made.query_norm(x @ made.query_down.weight.T)
    key = nn.functional.layer_norm(x @ indexer.key.weight.T, (9,), indexer.key_norm.weight, indexer.key_norm.bias, 1e-6)
    key, total = turn.rotate(key, torch.arange(x.shape[1])), torch.zeros(*x.shape[:2], x.shape[1]).double()
    for head in range(6):
        query = turn.rotate(latent @ indexer.query.weight[9 * head : 9 * head + 9].T, torch.arange(x.shape[1]))
        weight = x @ indexer.weights.weight[head] / 6**0.5
        for t in range(x.shape[1]):
            total[:, t] += weight[:, t, None] * torch.einsum("bd,bsd->bs", query[:, t] / 9**0.5, key).relu()
    return total


def chosen_by_hand(layer: LatentAttention, x: torch.Tensor, exists: torch.Tensor) -> torch.Tensor:
    scores = scores_by_hand(layer, x).masked_fill(~exists, float("-inf"))
    best = scores.topk(COUNT, -1)
    return torch.zeros_like(exists.expand_as(scores)).scatter(-1, best.indices, best.values > float("-inf"))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_layer_attends_to_the_keys_of_the_largest_scores(layout):
    layer, x, weights = sparse(layout=layout), text(), Weights()
    exists = chosen_by_hand(layer, x, CAUSAL.dense(LENGTH, LENGTH))
    seen = layer.observe(x, weights)
    assert torch.equal(seen[weights] > 0, exists.unsqueeze(1).expand(-1, 4, -1, -1))
    close(seen.output, dense_of(layer)(x, mask=exists.unsqueeze(1)))
    close(layer(x), seen.output)


def test_each_token_attends_to_as_many_keys_as_are_counted():
    seen = sparse().observe(text(), weights := Weights())
    expected = (torch.arange(LENGTH) + 1).clamp(max=COUNT)
    assert torch.equal((seen[weights] > 0).sum(-1), expected.expand(BATCH, 4, -1))


def test_all_keys_are_chosen_of_few():
    layer, x = sparse(count=LENGTH + 3), text()
    close(layer(x), dense_of(layer)(x))
    close(layer.step(x, layer.make_cache())[0], dense_of(layer)(x))


MASKS = {
    "causal": CAUSAL,
    "window": CAUSAL & (masks.window(before=6) | masks.prefix(2)),
    "both ways": masks.window(),
}


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [17, 1, 19], [LENGTH]])
def test_steps_equal_the_whole(name, chunks):
    layer, x = sparse(MASKS[name]), text()
    cache, outputs = layer.make_cache(), []
    with torch.no_grad():
        for chunk in x.split(chunks, dim=1):
            output, cache = layer.step(chunk, cache)
            outputs.append(output)
    close(torch.cat(outputs, 1), layer(x))
    assert cache.keys.shape[-1] == 5 + 4
    assert cache.values.shape[1:] == (1, len(cache), 9)


@pytest.mark.parametrize("name", MASKS)
def test_no_key_is_chosen_that_the_mask_hides(name):
    layer, x = sparse(MASKS[name]), text()
    padding = masks.padding(lengths=[LENGTH, 9, 0])
    exists = (MASKS[name] & padding).dense(LENGTH, LENGTH).squeeze(1)
    seen = layer.observe(x, weights := Weights(), mask=padding)
    expected = chosen_by_hand(layer, x, exists)
    assert torch.equal(seen[weights] > 0, expected.unsqueeze(1).expand(-1, 4, -1, -1))
    assert not seen.output[2].any()
    close(layer(x, mask=padding), dense_of(layer)(x, mask=expected.unsqueeze(1)))


def test_what_is_masked_reaches_nothing():
    layer, x = sparse(), text()
    keep = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    keep[1, ..., :8] = False
    expected = layer(x, mask=masks.where(keep=keep))
    spoilt = x.clone()
    spoilt[1, :8] = float("nan")
    found = layer(spoilt, mask=masks.where(keep=keep))
    close(found[0], expected[0])
    close(found[1, 8:], expected[1, 8:])


def test_padding_on_the_left_changes_nothing():
    layer, x = sparse(), text()
    shifted = torch.cat([text(length=6), x], 1)
    at = torch.arange(LENGTH + 6) - 6
    at = at.expand(BATCH, -1)
    close(layer(shifted, mask=~masks.prefix(0), positions=at)[:, 6:], layer(x))
    output, _ = layer.step(shifted, KVCache(), mask=~masks.prefix(0), positions=at)
    close(output[:, 6:], layer(x))


def test_gradients_are_those_of_the_chosen_keys():
    layer, x = sparse(), text(length=13).requires_grad_()
    exists = chosen_by_hand(layer, x.detach(), CAUSAL.dense(13, 13)).unsqueeze(1)
    above = text(length=13)
    parameters = [x, *layer.projections.parameters()]
    found = torch.autograd.grad(layer(x), parameters, above)
    expected = torch.autograd.grad(dense_of(layer)(x, mask=exists), parameters, above)
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-10)
    layer(x).sum().backward()
    assert layer.indexer is not None
    assert all(parameter.grad is None for parameter in layer.indexer.parameters())


def test_another_scale():
    layer, x = sparse(scale=0.25), text()
    assert layer.scale == 0.25
    exists = chosen_by_hand(layer, x, CAUSAL.dense(LENGTH, LENGTH))
    close(layer(x), dense_of(layer)(x, mask=exists.unsqueeze(1)))
    assert not torch.allclose(layer(x), sparse_with_the_weights_of(layer)(x))


def sparse_with_the_weights_of(layer: LatentAttention) -> LatentAttention:
    other = sparse()
    other.load_state_dict(layer.state_dict())
    return other


def test_without_rotary():
    projections = LatentProjections(DIM, 4, latent_dim=5, rotary_dim=4, query_latent_dim=LATENT, bias=True)
    indexer = LightningIndexer(DIM, LATENT, num_heads=2, head_dim=3, count=4)
    layer, x = LatentAttention(projections, None, indexer=indexer, mask=CAUSAL).double(), text(length=9)
    close(layer.step(x, layer.make_cache())[0], layer(x))
    assert [name for name, _ in projections.named_parameters() if name.endswith("bias")] == [
        "query_down.bias",
        "down.bias",
        "output.bias",
    ]


def test_an_earlier_layer_chooses():
    layer, x, selection = sparse(), text(), KeySelection()
    reader = LatentAttention(layer.projections, layer.rotary, indexer=EarlierIndexer(), mask=CAUSAL).double()
    expected = layer(x, selection=selection)
    assert selection.columns is not None
    assert selection.columns.shape == (BATCH, LENGTH, COUNT)
    close(reader(x, selection=selection), expected)
    cache, other = layer.make_cache(), reader.make_cache()
    for part in x.split([20, 1, 16], 1):
        step = KeySelection()
        output, cache = layer.step(part, cache, selection=step)
        found, other = reader.step(part, other, selection=step)
        close(found, output)
    assert other.values.numel() == 0


def test_selections_that_do_not_fit():
    layer, x = sparse(), text()
    reader = LatentAttention(layer.projections, layer.rotary, indexer=EarlierIndexer(), mask=CAUSAL).double()
    for selection in (None, KeySelection()):
        with pytest.raises(
            ConfigurationError, match="an earlier layer has chosen, and there are none: give both calls"
        ):
            reader(x, selection=selection)
    layer(x, selection=(selection := KeySelection()))
    with pytest.raises(ShapeError, match=re.escape("(3, 37), but the layer has tokens (3, 1): give each call")):
        reader.step(x[:, :1], reader.make_cache(), selection=selection)
    with pytest.raises(ConfigurationError, match="a selection was passed, but no indexer chooses the keys"):
        dense_of(layer)(x, selection=selection)
    plain = Attention(Projections(DIM, 4)).double()
    with pytest.raises(ConfigurationError, match="a selection was passed, but no indexer chooses the keys"):
        plain.step(x, plain.make_cache(), selection=selection)


def test_errors():
    layer, x = sparse(), text()
    projections = layer.projections
    with pytest.raises(ConfigurationError, match="a bias was given to a layer whose indexer chooses keys"):
        layer(x, bias=biases.alibi(4))
    with pytest.raises(ConfigurationError, match="a bias was given to a layer whose indexer chooses keys"):
        sparse(bias=biases.alibi(4))
    with pytest.raises(ConfigurationError, match="query_latent_dim=6, but queries are projected from vectors of 7"):
        LatentAttention(
            projections, None, indexer=LightningIndexer(DIM, 6, num_heads=2, head_dim=4, count=3), mask=CAUSAL
        )
    with pytest.raises(ConfigurationError, match="rotary turns 4 features, but the indexer has head_dim=3"):
        LatentAttention(projections, Rotary(4), indexer=LightningIndexer(DIM, 7, num_heads=2, head_dim=3, count=3))
    with pytest.raises(ConfigurationError, match="scale is 0; it needs a finite number above 0"):
        LatentAttention(projections, Rotary(4), scale=0)
    with pytest.raises(ConfigurationError, match="an indexer has no layout 'whole'"):
        LightningIndexer(DIM, 7, num_heads=2, head_dim=4, count=3, layout="whole")  # type: ignore[arg-type]
    for name in ("num_heads", "head_dim", "count"):
        sizes: dict[str, Any] = {"num_heads": 2, "head_dim": 4, "count": 3} | {name: 0}
        with pytest.raises(ConfigurationError, match=f"{name} is 0; it needs at least 1"):
            LightningIndexer(DIM, 7, **sizes)
    per_head = torch.ones(4, LENGTH, LENGTH, dtype=torch.bool)
    with pytest.raises(ShapeError, match=re.escape("which differs between 4 heads; all heads share what is chosen")):
        layer(x, mask=per_head)


def test_as_a_module():
    torch.compiler.reset()
    layer, x = sparse(), text()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    close(compiled(x), layer(x))
    assert copy.deepcopy(layer)(x).equal(layer(x))
    half = copy.deepcopy(layer).bfloat16()
    output, cache = half.step(x.bfloat16(), half.make_cache())
    assert output.dtype == cache.keys.dtype == cache.values.dtype == torch.bfloat16
    assert output.isfinite().all()
