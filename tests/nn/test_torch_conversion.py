"""torch's Transformer layers as blocks: the same outputs and gradients, for every construction, mask and step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.errors import ConfigurationError
from regard.models.transformer import Decoder, Encoder
from regard.nn import block_from_torch, blocks_from_torch, swap

DIM, HEADS, HIDDEN = 12, 3, 20
SOURCE = torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(2))
PADDED = torch.arange(7) >= torch.tensor([[7], [4]])  # True = leave out, as torch has it

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True.*:UserWarning")


def randomized(module: Any) -> Any:
    """The module in evaluation, with all parameters random: biases and norms start at 0 and 1 otherwise."""
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module.eval()


def close(ours: Tensor, expected: Tensor) -> None:
    """Equal to a few roundings of float32 (outputs are of size 1 to 10), or of float64."""
    tolerance = 2e-5 if expected.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()], ids=["relu", "gelu", "module"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
class TestLayers:
    @pytest.fixture
    def options(self, dtype, activation, norm_first, bias):
        return {"activation": activation, "norm_first": norm_first, "bias": bias, "dtype": dtype, "batch_first": True}

    def test_encoder_layer(self, options, dtype):
        layer, x = randomized(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, **options)), SOURCE.to(dtype)
        block = block_from_torch(layer)
        close(block(x), layer(x))
        there = ~PADDED
        padded = block(x, mask=masks.from_multihead(key_padding_mask=PADDED))
        close(padded[there], layer(x, src_key_padding_mask=PADDED)[there])

    def test_decoder_layer(self, options, dtype):
        layer = randomized(nn.TransformerDecoderLayer(DIM, HEADS, HIDDEN, **options))
        block, x, memory = block_from_torch(layer, mask=masks.causal()), TARGET.to(dtype), SOURCE.to(dtype)
        later = torch.ones(5, 5, dtype=torch.bool).triu(1)
        expected = layer(x, memory, tgt_mask=later, memory_key_padding_mask=PADDED)
        padding = masks.from_multihead(key_padding_mask=PADDED)
        close(block(x, memory, memory_mask=padding), expected)
        outputs, cache = [], block.make_cache(memory)
        for token in x.split(1, dim=1):
            output, cache = block.step(token, cache, memory_mask=padding)
            outputs.append(output)
        close(torch.cat(outputs, 1), expected)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_a_whole_transformer(norm_first):
    model = randomized(nn.Transformer(DIM, HEADS, 2, 3, HIDDEN, norm_first=norm_first, batch_first=True))
    encoder = Encoder(*blocks_from_torch(model.encoder))
    decoder = Decoder(*blocks_from_torch(model.decoder, mask=masks.causal()))
    later = model.generate_square_subsequent_mask(5)
    close(decoder(TARGET, decoder.project_memory(encoder(SOURCE))), model(SOURCE, TARGET, tgt_mask=later))


def test_gradients():
    layer = randomized(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True)).double().train()
    block, x = block_from_torch(layer), SOURCE.double().requires_grad_()
    parameters = dict(block.named_parameters())
    weights = [parameters["feed_forward.up.weight"], parameters["attention_residual.norm.bias"]]
    ours = torch.autograd.grad(block(x).square().sum(), [x, *weights])
    expected = torch.autograd.grad(layer(x).square().sum(), [x, layer.linear1.weight, layer.norm1.bias])
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_stack_without_a_final_norm():
    stack = randomized(nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, batch_first=True), 2))
    blocks, norm = blocks_from_torch(stack)
    assert norm is None
    close(Encoder(blocks, norm)(SOURCE), stack(SOURCE))


def test_the_weights_are_copies_and_settings_are_kept():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, dropout=0.3, layer_norm_eps=1e-3)
    layer.dropout1.p, layer.dropout.p, layer.self_attn.dropout = 0.1, 0.2, 0.4
    block, before = block_from_torch(layer), copy.deepcopy(layer.state_dict())
    assert block.training
    assert block.attention.dropout == 0.4  # type: ignore[attr-defined]
    residuals: Any = (block.attention_residual, block.feed_forward_residual)
    assert [residual.dropout.p for residual in residuals] == [0.1, 0.3]
    assert block.feed_forward.dropout.p == 0.2  # type: ignore[union-attr]
    assert residuals[0].norm.eps == 1e-3
    assert all(parameter.requires_grad for parameter in block.parameters())
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert all(tensor.equal(before[name]) for name, tensor in layer.state_dict().items())


def test_a_layer_whose_attention_is_regards():
    layer = randomized(nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, batch_first=True))
    close(block_from_torch(swap(copy.deepcopy(layer)).model)(SOURCE), layer(SOURCE))  # type: ignore[arg-type]


def test_what_is_refused():
    class Own(nn.TransformerEncoderLayer):
        pass

    with pytest.raises(ConfigurationError, match=r"TransformerDecoderLayer; this is a .*Own\. .* a subclass may"):
        block_from_torch(Own(DIM, HEADS))
    with pytest.raises(ConfigurationError, match="For a stack of layers there is blocks_from_torch"):
        block_from_torch(nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS), 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Transformer: convert its encoder and its decoder"):
        blocks_from_torch(nn.Transformer(DIM, HEADS, 1, 1))  # type: ignore[arg-type]
    layer = nn.TransformerEncoderLayer(DIM, HEADS)
    layer.self_attn = nn.MultiheadAttention(DIM, HEADS, add_zero_attn=True)
    with pytest.raises(ConfigurationError, match="add_zero_attn, which nn.Attention has not: keep torch's layer"):
        block_from_torch(layer)


class Adapted(nn.Linear):
    """A linear layer with more than its weight."""

    def forward(self, *inputs):
        return super().forward(*inputs) + 1


class Louder(nn.MultiheadAttention):
    """An attention with another forward."""

    def forward(self, *arguments, **options):
        output, weights = super().forward(*arguments, **options)
        return 2 * output, weights


PARTS = {
    "linear1": (lambda: Adapted(DIM, 2048), r"the feed-forward layer of this layer is a .*Adapted, .* than a Linear"),
    "linear2": (lambda: Adapted(2048, DIM), r"the feed-forward layer of this layer is a .*Adapted"),
    "self_attn": (
        lambda: Louder(DIM, HEADS),
        r"the attention of this layer is a .*Louder, .* than a MultiheadAttention",
    ),
    "self_attn.out_proj": (lambda: Adapted(DIM, DIM), r"the output projection of this layer is a .*Adapted"),
    "dropout": (nn.AlphaDropout, r"the dropout of this layer is a .*AlphaDropout, .* than a Dropout"),
    "dropout2": (nn.AlphaDropout, r"the dropout of this layer is a .*AlphaDropout"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_computes_something_else_is_refused(part):
    """Its weights alone would be taken, and the rest of it dropped."""
    layer, (make, message) = nn.TransformerEncoderLayer(DIM, HEADS), PARTS[part]
    layer.set_submodule(part, make())
    with pytest.raises(ConfigurationError, match=message):
        block_from_torch(layer)


def test_a_forward_of_ones_own_on_a_part_is_refused():
    layer = nn.TransformerEncoderLayer(DIM, HEADS)
    layer.linear1.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="of this layer is a Linear with another forward, which may compute"):
        block_from_torch(layer)


def test_parametrised_weights_are_those_that_they_compute():
    layer = nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True).eval()
    nn.utils.parametrizations.weight_norm(layer.linear1)
    x = torch.randn(2, 5, DIM)
    torch.testing.assert_close(block_from_torch(layer)(x), layer(x))
