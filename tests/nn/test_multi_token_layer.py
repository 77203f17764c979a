"""The layer of multi-token attention: by hand, with caches, in a block, and errors."""

import pytest
import torch
from torch import Tensor, nn

from regard import lenses, masks, normalizers
from regard.errors import ConfigurationError
from regard.nn import MultiTokenAttention, PreNorm, Projections, RMSNorm, TransformerBlock
from regard.nn.feedforward import FeedForward
from regard.positions import Rotary

from ..normalizers.mixed_formulas import multi_token_weights, output_of

DIM, HEADS, BATCH, LENGTH = 24, 4, 3, 23


def layer_of(queries: int = 3, **options) -> MultiTokenAttention:
    projections = Projections(DIM, num_heads=HEADS, num_kv_heads=2, head_dim=6)
    learned = normalizers.MultiToken.learned(HEADS, queries=queries, keys=5)
    layer = MultiTokenAttention(projections, learned, norm=lambda dim: RMSNorm(dim, 1e-5), **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double()


def tokens() -> Tensor:
    return torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)


def test_it_is_the_formula():
    layer, x, weights = layer_of(mask=masks.causal()), tokens(), lenses.Weights()
    queries, (keys, values) = layer.projections.queries(x), layer.projections.keys_and_values(x)
    keep = masks.causal().dense(LENGTH, LENGTH)
    expected = multi_token_weights(queries, keys, keep, *layer.normalizer.tensors())
    torch.testing.assert_close(layer.observe(x, weights)[weights], expected)
    heads = layer.norm(output_of(expected, values))
    torch.testing.assert_close(layer(x), layer.projections.project_output(heads))


@pytest.mark.parametrize("queries", [1, 3, 9])
@pytest.mark.parametrize("mask", [masks.causal(), masks.causal() & masks.window(before=2)], ids=str)
def test_steps_are_the_whole_sequence(queries, mask):
    layer, x = layer_of(queries, mask=mask, rotary=Rotary(6)), tokens()
    with torch.no_grad():
        cache, outputs = layer.make_cache(), []
        for part in x.split([4, 1, 1, 3, 2, 12], dim=1):
            output, cache = layer.step(part, cache)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x))


def test_the_weights_of_a_step():
    layer, x, weights = layer_of(mask=masks.causal()), tokens(), lenses.Weights()
    with torch.no_grad():
        _, cache = layer.step(x[:, :-2], layer.make_cache())
        seen, _ = layer.observe_step(x[:, -2:], cache, weights)
        whole = layer.observe(x, weights)
    torch.testing.assert_close(seen[weights][:, :, -2:], whole[weights][:, :, -2:])
    torch.testing.assert_close(seen.output, whole.output[:, -2:])


def test_a_long_decoding_keeps_few_queries():
    layer = layer_of(mask=masks.causal())
    with torch.no_grad():
        cache = layer.make_cache()
        for part in torch.randn(1, 200, DIM, dtype=torch.float64).split(1, dim=1):
            _, cache = layer.step(part, cache)
    assert len(cache.stored) == 200
    assert len(cache.queries) < 60
    assert cache.next_position == 200


def test_left_padding_and_beams():
    layer, x = layer_of(mask=masks.causal() & ~masks.prefix(0)), tokens()
    positions = torch.arange(LENGTH) - torch.tensor([0, 3, 5])[:, None]
    whole = layer(x, positions=positions)
    for row, left in enumerate((0, 3, 5)):
        torch.testing.assert_close(whole[row, left:], layer(x[row : row + 1, left:])[0])
    with torch.no_grad():
        first, cache = layer.step(x[:, :9], layer.make_cache(), positions=positions[:, :9])
        beams = torch.tensor([2, 0, 1])
        last, _ = layer.step(x[beams, 9:], cache.reorder(beams), positions=positions[beams, 9:])
    torch.testing.assert_close(torch.cat([first[beams], last], 1), whole[beams].detach())


def test_in_a_block():
    block = TransformerBlock(
        layer_of(mask=masks.causal()), FeedForward(DIM, 8), lambda: PreNorm(nn.RMSNorm(DIM))
    ).double()
    x = tokens()
    first, cache = block.step(x[:, :6], block.make_cache())
    last, _ = block.step(x[:, 6:], cache)
    torch.testing.assert_close(torch.cat([first, last], 1), block(x))


def test_every_parameter_has_a_gradient():
    layer = layer_of(mask=masks.causal())
    layer(tokens()).square().sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    # A number added to all keys changes no softmax, but that of weights convolved over their edges.
    assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []


def test_what_does_not_fit_is_named():
    with pytest.raises(ConfigurationError, match=r"needs a normalizers\.MultiToken .*given TalkingHeads\("):
        MultiTokenAttention(Projections(DIM, HEADS), normalizers.TalkingHeads.learned(HEADS))  # type: ignore[reportArgumentType]
