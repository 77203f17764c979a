"""The block of a Transformer: torch's own with the same weights, and decoding as the whole sequence."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Weights
from regard.nn import (
    Attention,
    BlockCache,
    FeedForward,
    GatedFeedForward,
    KVCache,
    PostNorm,
    PreNorm,
    Projections,
    SandwichNorm,
    TransformerBlock,
)
from regard.positions import Rotary

DIM, HIDDEN, BATCH = 12, 19, 3
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def block_of(order: type[PreNorm] | type[PostNorm], *, cross: bool = False, activation=functional.relu):
    return TransformerBlock(
        Attention(Projections(DIM, 4)),
        FeedForward(DIM, HIDDEN, activation=activation),
        lambda: order(nn.LayerNorm(DIM)),
        cross_attention=Attention(Projections(DIM, 4)) if cross else None,
    )


def pairs_of(theirs: Any, ours: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter of torch's layer, or a third of it, and ours that means the same; in their graph, as it is."""
    attentions = [(theirs.self_attn, ours.attention, theirs.norm1, ours.attention_residual)]
    last = theirs.norm2
    if isinstance(theirs, nn.TransformerDecoderLayer):
        attentions.append((theirs.multihead_attn, ours.cross_attention, theirs.norm2, ours.cross_residual))
        last = theirs.norm3
    pairs = []
    for attention, own, norm, residual in attentions:
        made = own.projections
        for linear, weight, bias in zip(
            (made.query, made.key, made.value),
            attention.in_proj_weight.chunk(3),
            attention.in_proj_bias.chunk(3),
            strict=True,
        ):
            pairs += [(weight, linear.weight), (bias, linear.bias)]
        pairs += matched(attention.out_proj, made.output) + matched(norm, residual.norm)
    fed = ours.feed_forward
    pairs += matched(theirs.linear1, fed.up) + matched(theirs.linear2, fed.down)
    return pairs + matched(last, ours.feed_forward_residual.norm)


def matched(theirs: nn.Module, ours: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(theirs.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
class TestTorch:
    def test_output_and_gradients(self, kind, norm_first, dtype):
        torch_layer = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}[kind]
        theirs = torch_layer(
            DIM, 4, HIDDEN, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first, dtype=dtype
        )
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.3)
        ours = block_of(PreNorm if norm_first else PostNorm, cross=kind == "decoder", activation=functional.gelu)
        ours = ours.to(dtype)
        with torch.no_grad():
            for source, target in pairs_of(theirs, ours):
                target.copy_(source)
        inputs = [torch.randn(BATCH, 7, DIM, dtype=dtype, requires_grad=True)]
        if kind == "decoder":
            inputs.append(torch.randn(BATCH, 5, DIM, dtype=dtype, requires_grad=True))
            ignored = torch.ones(7, 7, dtype=torch.bool).triu(1)
            expected = theirs(*inputs, tgt_mask=ignored)
            output = ours(*inputs, mask=masks.causal())
        else:
            padded = torch.arange(7) >= torch.tensor([7, 4, 6])[:, None]
            expected = theirs(*inputs, src_key_padding_mask=padded)
            output = ours(*inputs, mask=masks.padding(lengths=[7, 4, 6]))
        close(output, expected, TOLERANCES[dtype])
        self.compare_gradients(theirs, ours, inputs, expected, output, 10 * TOLERANCES[dtype])

    def compare_gradients(self, theirs, ours, inputs, expected, output, tolerance):
        above = torch.randn_like(expected)
        in_theirs = torch.autograd.grad(expected, [*inputs, *theirs.parameters()], above)
        in_ours = torch.autograd.grad(output, [*inputs, *ours.parameters()], above)
        count = len(inputs)
        for gradient, known in zip(in_ours[:count], in_theirs[:count], strict=True):
            close(gradient, known, tolerance)
        with torch.no_grad():  # each gradient in the place of its parameter, then compared as parameters are
            for parameter, gradient in zip(theirs.parameters(), in_theirs[count:], strict=True):
                parameter.copy_(gradient)
            for parameter, gradient in zip(ours.parameters(), in_ours[count:], strict=True):
                parameter.copy_(gradient)
        for known, gradient in pairs_of(theirs, ours):
            close(gradient, known, tolerance)


class TestResiduals:
    X = torch.randn(2, 3, DIM, dtype=torch.float64)

    def test_formulas(self):
        norm, other = nn.RMSNorm(DIM).double(), nn.LayerNorm(DIM).double()
        part, x = nn.Linear(DIM, DIM).double(), self.X

        def through(residual):
            return residual.after(x, part(residual.before(x)))

        assert through(PostNorm(norm)).equal(norm(x + part(x)))
        assert through(PreNorm(norm)).equal(x + part(norm(x)))
        assert through(SandwichNorm(norm, other)).equal(x + other(part(norm(x))))

    @pytest.mark.parametrize("make", [PreNorm, PostNorm, lambda norm, p: SandwichNorm(norm, nn.Identity(), p)])
    def test_dropout_is_of_what_the_part_said(self, make):
        residual = make(nn.Identity(), 0.5)
        x, said = torch.full((1000,), 100.0), torch.ones(1000)
        added = residual.after(x, said) - x
        assert set(added.tolist()) == {0.0, 2.0}
        assert (residual.eval().after(x, said) - x).equal(said)

    def test_each_part_has_its_own(self):
        block = block_of(PreNorm, cross=True)
        assert len({id(module) for module in block.modules() if isinstance(module, nn.LayerNorm)}) == 3


class TestFeedForward:
    def test_formulas(self):
        x = torch.randn(2, 3, 5, dtype=torch.float64)
        plain = FeedForward(5, 7).double()
        expected = torch.relu(x @ plain.up.weight.T + plain.up.bias) @ plain.down.weight.T + plain.down.bias
        close(plain(x), expected, 1e-12)
        gated = GatedFeedForward(5, 7).double()
        gate, up = x @ gated.gate.weight.T, x @ gated.up.weight.T
        close(gated(x), (gate * torch.sigmoid(gate) * up) @ gated.down.weight.T, 1e-12)
        geglu = GatedFeedForward(5, 7, activation=nn.GELU(), bias=True).double()
        nn.init.normal_(geglu.gate.bias)
        gate, up = geglu.gate(x), geglu.up(x)
        close(geglu(x), geglu.down(0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up), 1e-12)

    @pytest.mark.parametrize("make", [FeedForward, GatedFeedForward])
    def test_start_dropout_and_errors(self, make):
        layer = make(40, 60, bias=True, dropout=0.5)
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            assert 0.95 * (6 / 100) ** 0.5 < linear.weight.abs().max() <= (6 / 100) ** 0.5
            assert not linear.bias.any()
        x = torch.randn(2, 3, 40)
        assert not layer(x).equal(layer(x))
        assert layer.eval()(x).equal(layer(x))
        with pytest.raises(ShapeError, match=r"input has the shape \(2, 3, 41\); it needs \(batch, length, 40\)"):
            layer(torch.randn(2, 3, 41))
        with pytest.raises(ConfigurationError, match="hidden_dim is 0; it needs at least 1"):
            make(40, 0)
        with pytest.raises(ConfigurationError, match="dropout is 1; it needs a probability"):
            make(40, 60, dropout=1)


def decoder_layers(count: int) -> list[TransformerBlock]:
    """Blocks with a window, grouped heads, rotary and a memory."""
    return [
        TransformerBlock(
            Attention(
                Projections(DIM, 4, num_kv_heads=2, norm=nn.RMSNorm),
                mask=masks.causal() & (masks.window(before=3 + layer) | masks.prefix(1)),
                rotary=Rotary(2),
                sinks=torch.randn(4),
            ),
            GatedFeedForward(DIM, HIDDEN),
            lambda: PreNorm(nn.RMSNorm(DIM)),
            cross_attention=Attention(Projections(DIM, 4, memory_dim=5)),
        ).double()
        for layer in range(count)
    ]


class TestDecoding:
    @pytest.mark.parametrize("chunks", [[50], [1] * 50, [7, 1, 1, 20, 1, 20], [45, 5]])
    def test_equals_the_whole_across_layers(self, chunks):
        layers = decoder_layers(3)
        x, memory = torch.randn(BATCH, 50, DIM).double(), torch.randn(BATCH, 9, 5).double()
        memory_mask = masks.padding(lengths=[9, 4, 1])
        expected = x
        for layer in layers:
            expected = layer(expected, memory, memory_mask=memory_mask)
        with torch.no_grad():
            caches = [layer.make_cache(memory) for layer in layers]
            outputs = []
            for h in x.split(chunks, dim=1):
                for number, layer in enumerate(layers):
                    h, caches[number] = layer.step(h, caches[number], memory_mask=memory_mask)
                outputs.append(h)
        close(torch.cat(outputs, 1), expected, 1e-12)
        assert all(isinstance(cache.attention, KVCache) and len(cache.attention) < 50 for cache in caches)

    def test_beams_are_reordered(self):
        (layer,) = decoder_layers(1)
        x, memory = torch.randn(BATCH, 6, DIM).double(), torch.randn(BATCH, 9, 5).double()
        _, cache = layer.step(x[:, :4], layer.make_cache(memory))
        rows = torch.tensor([2, 0, 2, 1])
        output, after = layer.step(x[rows, 4:], cache.reorder(rows))
        close(output, layer(x[rows], memory[rows])[:, 4:], 1e-12)
        assert after.nbytes > cache.attention.nbytes
        close(layer.step(x[:, 4:], cache)[0], layer(x, memory)[:, 4:], 1e-12)

    def test_queries_of_cross_attention_stand_where_they_stand(self):
        block = block_of(PostNorm, cross=True).double()
        x, memory = torch.randn(BATCH, 6, DIM).double(), torch.randn(BATCH, 6, DIM).double()
        expected = block(x, memory, mask=masks.causal(), memory_mask=masks.causal())
        first, cache = block.step(x[:, :2], block.make_cache(memory), mask=masks.causal(), memory_mask=masks.causal())
        last, _ = block.step(x[:, 2:], cache, mask=masks.causal(), memory_mask=masks.causal())
        close(torch.cat([first, last], 1), expected, 1e-12)


class TestObserve:
    def test_equals_forward_and_step(self):
        (layer,) = decoder_layers(1)
        x, memory, lens = torch.randn(BATCH, 6, DIM).double(), torch.randn(BATCH, 9, 5).double(), Weights()
        seen = layer.observe(x, lens, memory=memory)
        close(seen.output, layer(x, memory), 1e-12)
        assert seen.attention[lens].shape == (BATCH, 4, 6, 6)
        assert seen.cross_attention is not None
        assert seen.cross_attention[lens].shape == (BATCH, 4, 6, 9)
        cache = layer.make_cache(memory)
        first, cache = layer.observe_step(x[:, :4], cache, lens)
        last, cache = layer.observe_step(x[:, 4:], cache, lens)
        close(torch.cat([first.output, last.output], 1), seen.output, 1e-12)
        close(last.attention[lens], seen.attention[lens][..., 4:, :], 1e-12)
        assert last.cross_attention is not None
        close(last.cross_attention[lens], seen.cross_attention[lens][..., 4:, :], 1e-12)

    def test_without_a_memory(self):
        block, x = block_of(PreNorm), torch.randn(BATCH, 6, DIM)
        seen = block.observe(x, Weights(), mask=masks.causal())
        assert seen.cross_attention is None
        close(seen.output, block(x, mask=masks.causal()), 1e-6)


class TestModule:
    def test_under_torch_compile(self):
        torch.compiler.reset()
        (layer,) = decoder_layers(1)
        x, memory = torch.randn(BATCH, 6, DIM).double(), torch.randn(BATCH, 9, 5).double()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        close(compiled(x, memory), layer(x, memory), 1e-12)

    def test_copies_and_state(self):
        (layer,), (other,) = decoder_layers(1), decoder_layers(1)
        x, memory = torch.randn(BATCH, 6, DIM).double(), torch.randn(BATCH, 9, 5).double()
        other.load_state_dict(layer.state_dict())
        assert other(x, memory).equal(layer(x, memory))
        assert copy.deepcopy(layer)(x, memory).equal(layer(x, memory))

    def test_under_autocast(self):
        block, x = block_of(PostNorm), torch.randn(BATCH, 6, DIM)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = block(x)
            stepped, _ = block.step(x, block.make_cache())
        close(output.float(), block(x), 5e-2)
        close(stepped.float(), output.float(), 5e-2)


class TestErrors:
    def test_memory(self):
        x = torch.randn(BATCH, 6, DIM)
        alone, crossed = block_of(PreNorm), block_of(PreNorm, cross=True)
        for call in (crossed, crossed.observe):
            with pytest.raises(ShapeError, match="the block has cross-attention, and got no memory"):
                call(x)
        with pytest.raises(ShapeError, match="has cross-attention, and got no memory"):
            crossed.make_cache()
        with pytest.raises(ShapeError, match="got a memory, but it has no cross-attention"):
            alone(x, x)

    def test_caches(self):
        x = torch.randn(BATCH, 6, DIM)
        alone, crossed = block_of(PreNorm), block_of(PreNorm, cross=True)
        with pytest.raises(ConfigurationError, match=r"step needs a BlockCache, as block.make_cache\(\) returns"):
            alone.step(x, KVCache())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="the cache has no memory, and the block has cross-attention"):
            crossed.step(x, BlockCache(KVCache()))
        with pytest.raises(ConfigurationError, match="the cache has a memory, but the block has no cross-attention"):
            alone.step(x, crossed.make_cache(x))

    def test_residuals(self):
        with pytest.raises(ConfigurationError, match="residual makes a LayerNorm; a block needs a residual"):
            TransformerBlock(Attention(Projections(DIM, 4)), FeedForward(DIM, 5), lambda: nn.LayerNorm(DIM))  # type: ignore
