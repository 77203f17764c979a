"""Attention as a layer: the formula, every object it is made of, and what it says of bad input."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard import biases, masks, scores
from regard.errors import ConfigurationError, DtypeError, MaskError, ShapeError
from regard.lenses import Weights
from regard.nn import Attention, KVCache, ProjectedMemory, Projections, RMSNorm
from regard.positions import Rotary

DIM, LENGTH, BATCH = 12, 7, 3


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def heads_of(tensor: torch.Tensor, linear: Any, heads: int) -> torch.Tensor:
    """Each head by its own slice of the matrix, (batch, heads, length, d)."""
    weight, bias = linear.weight, linear.bias
    width = len(weight) // heads
    parts = []
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        part = torch.einsum("bld,od->blo", tensor, weight[rows])
        parts.append(part if bias is None else part + bias[rows])
    return torch.stack(parts, 1)


def by_hand(layer: Attention, x: torch.Tensor, memory: torch.Tensor, change=lambda scores: scores) -> torch.Tensor:
    """softmax(Q Kᵀ / √d) V and the output's map, head by head, with key heads repeated."""
    made = layer.projections
    query = heads_of(x, made.query, made.num_heads)
    group = made.num_heads // made.num_kv_heads
    key, value = (
        heads_of(memory, linear, made.num_kv_heads).repeat_interleave(group, 1) for linear in (made.key, made.value)
    )
    weights = change(torch.einsum("bhmd,bhnd->bhmn", query, key) / math.sqrt(made.head_dim)).softmax(-1)
    context = torch.einsum("bhmn,bhnd->bhmd", weights, value)
    return made.output(torch.cat(list(context.unbind(1)), -1))


def filled(layer: Attention) -> Attention:
    """Every additive bias, too, away from 0."""
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.double()


class TestFormula:
    @pytest.mark.parametrize(
        "projections",
        [
            {"num_heads": 4},
            {"num_heads": 4, "num_kv_heads": 2},
            {"num_heads": 4, "num_kv_heads": 1, "bias": False},
            {"num_heads": 3, "head_dim": 5, "value_dim": 2, "bias": ("query", "output")},
            {"num_heads": 6, "num_kv_heads": 3, "head_dim": 7, "bias": "value"},
        ],
    )
    def test_self_attention(self, projections):
        layer, x = filled(Attention(Projections(DIM, **projections))), double(BATCH, LENGTH, DIM)
        close(layer(x), by_hand(layer, x, x))

    def test_cross_attention_of_other_dims(self):
        layer = filled(Attention(Projections(DIM, 4, num_kv_heads=2, value_dim=5, memory_dim=11)))
        x, memory = double(BATCH, LENGTH, DIM), double(BATCH, 5, 11)
        close(layer(x, memory), by_hand(layer, x, memory))
        close(layer(x, layer.project_memory(memory)), layer(x, memory))

    def test_memory_of_the_same_dim(self):
        layer, x, memory = filled(Attention(Projections(DIM, 4))), double(BATCH, 5, DIM), double(BATCH, LENGTH, DIM)
        close(layer(x, memory), by_hand(layer, x, memory))

    @pytest.mark.parametrize("own", [True, False], ids=["own", "of the call"])
    def test_masks_and_biases(self, own):
        added = double(4, LENGTH, LENGTH)
        mask, bias = masks.causal() & masks.window(before=2), biases.tensor(added)
        layer = Attention(Projections(DIM, 4), mask=mask if own else None, bias=bias if own else None)
        layer, x = filled(layer), double(BATCH, LENGTH, DIM)
        output = layer(x) if own else layer(x, mask=mask, bias=bias)
        close(output, by_hand(layer, x, x, lambda s: (s + added).masked_fill(~mask.dense(LENGTH, LENGTH), -math.inf)))

    def test_masks_and_biases_of_the_call_join_the_layers_own(self):
        added, more = double(4, LENGTH, LENGTH), double(LENGTH, LENGTH)
        layer = filled(Attention(Projections(DIM, 4), mask=masks.causal(), bias=added))
        x, kept = double(BATCH, LENGTH, DIM), torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.8
        kept |= torch.eye(LENGTH, dtype=torch.bool)

        def change(s):
            return (s + added + more).masked_fill(~(masks.causal().dense(LENGTH, LENGTH) & kept), -math.inf)

        close(layer(x, mask=kept, bias=more), by_hand(layer, x, x, change))
        close(layer(x, mask=masks.where(keep=kept), bias=biases.tensor(more)), by_hand(layer, x, x, change))

    def test_softcap(self):
        layer, x = filled(Attention(Projections(DIM, 4), softcap=0.5)), double(BATCH, LENGTH, DIM)
        close(layer(x), by_hand(layer, x, x, lambda s: 0.5 * torch.tanh(s / 0.5)))

    def test_sinks(self):
        layer = filled(Attention(Projections(DIM, 4, bias=False), sinks=torch.zeros(4)))
        layer.projections.output.weight.data = torch.eye(DIM, dtype=torch.float64)
        x = double(BATCH, LENGTH, DIM)
        _, lse = regard.attention_with_lse(
            layer.projections.queries(x), *layer.projections.keys_and_values(x), sinks=None
        )
        assert layer.sinks is not None
        share = torch.exp(lse - torch.logaddexp(lse, layer.sinks[:, None]))  # what the sink leaves
        plain = by_hand(layer, x, x).unflatten(-1, (4, 3)).transpose(1, 2)
        close(layer(x), (plain * share.unsqueeze(-1)).transpose(1, 2).flatten(-2))

    @pytest.mark.parametrize(
        "score",
        [scores.Additive(3, 3, 5), scores.General(3, 3), scores.ScaledDot(0.7), scores.Location(3, 9)],
        ids=lambda score: type(score).__name__,
    )
    def test_scores(self, score):
        layer, x = filled(Attention(Projections(DIM, 4), score=score)), double(BATCH, LENGTH, DIM)
        query, (key, value) = layer.projections.queries(x), layer.projections.keys_and_values(x)
        scored = score.pairs(query, key).scores()
        context = scored.softmax(-1) @ value
        close(layer(x), layer.projections.output(context.transpose(1, 2).flatten(-2)))
        memory = double(BATCH, 5, DIM)
        close(layer(x, layer.project_memory(memory)), layer(x, memory))
        assert any(name.startswith("score.") for name, _ in layer.named_parameters()) == bool(list(score.parameters()))

    def test_norms_of_queries_and_keys(self):
        layer = filled(Attention(Projections(DIM, 4, num_kv_heads=2, norm=nn.RMSNorm)))
        x = double(BATCH, LENGTH, DIM)
        made = layer.projections
        query, key = heads_of(x, made.query, 4), heads_of(x, made.key, 2)

        def normed(heads, norm):
            size = heads.square().mean(-1, keepdim=True).add(torch.finfo(heads.dtype).eps).sqrt()
            return heads / size * norm.weight

        close(made.queries(x), normed(query, made.query_norm))
        close(made.keys_and_values(x)[0], normed(key, made.key_norm))

    def test_rotary_turns_queries_and_keys_by_their_positions(self):
        rotary = Rotary(2)
        layer, x = filled(Attention(Projections(DIM, 4), rotary=rotary)), double(BATCH, LENGTH, DIM)
        at = torch.tensor([3, 1, 4, 1, 5, 9, 2])
        query, (key, value) = layer.projections.queries(x), layer.projections.keys_and_values(x)
        context = regard.attention(rotary.rotate(query, at), rotary.rotate(key, at), value)
        close(layer(x, positions=at), layer.projections.project_output(context))
        counted = torch.arange(LENGTH)
        close(layer(x), layer(x, positions=counted))
        close(layer(x), layer(x, positions=counted + 1000), 1e-9)  # distances alone matter
        close(layer(x), layer(x, positions=counted.expand(BATCH, LENGTH)))
        assert not torch.allclose(layer(x), layer(x, positions=2 * counted))

    def test_cross_attention_turns_each_side_by_its_own_positions(self):
        layer = filled(Attention(Projections(DIM, 4), rotary=Rotary(2)))
        x, memory = double(BATCH, LENGTH, DIM), double(BATCH, 5, DIM)
        close(layer(x, memory), layer(x, memory, positions=torch.arange(LENGTH), memory_positions=torch.arange(5)))
        moved = layer(x, memory, positions=torch.arange(LENGTH) + 8, memory_positions=torch.arange(5) + 8)
        close(layer(x, memory), moved, 1e-9)
        held = layer.project_memory(memory, torch.arange(5) + 8)
        close(layer(x, held, positions=torch.arange(LENGTH) + 8), moved)

    @pytest.mark.parametrize("length", [2, 5, 9])
    def test_queries_of_cross_attention_begin_at_0(self, length):
        mask = masks.causal()
        layer, x, memory = filled(Attention(Projections(DIM, 4), mask=mask)), double(1, length, DIM), double(1, 5, DIM)
        kept = torch.arange(5) <= torch.arange(length)[:, None]
        close(layer(x, memory), by_hand(layer, x, memory, lambda s: s.masked_fill(~kept, -math.inf)))

    def test_positions_are_data_of_each_sequence(self):
        layer, x = filled(Attention(Projections(DIM, 4), mask=masks.causal())), double(BATCH, LENGTH, DIM)
        order = torch.stack([torch.randperm(LENGTH) for _ in range(BATCH)])
        mixed = x.gather(1, order.unsqueeze(-1).expand_as(x))
        expected = layer(x).gather(1, order.unsqueeze(-1).expand_as(x))
        close(layer(mixed, positions=order), expected)

    def test_it_is_torchs_layer_with_the_same_weights(self):
        theirs = nn.MultiheadAttention(DIM, 4, batch_first=True).double()
        layer = filled(Attention(Projections(DIM, 4)))
        copy_weights(theirs, layer)
        x, memory = double(BATCH, LENGTH, DIM), double(BATCH, 5, DIM)
        close(layer(x, memory), theirs(x, memory, memory)[0])

    def test_gradients(self):
        layer = filled(Attention(Projections(6, 2, num_kv_heads=1), mask=masks.causal(), sinks=torch.zeros(2)))
        assert torch.autograd.gradcheck(layer, double(2, 3, 6).requires_grad_())
        layer(double(2, 3, 6)).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def copy_weights(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    """torch's packed parameters into the four maps."""
    made = ours.projections
    with torch.no_grad():
        for linear, weight, bias in zip(
            (made.query, made.key, made.value),
            theirs.in_proj_weight.chunk(3),
            theirs.in_proj_bias.chunk(3),
            strict=True,
        ):
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        made.output.load_state_dict(theirs.out_proj.state_dict())


class TestDropout:
    def test_weights_are_dropped_in_training_alone(self):
        layer, x = filled(Attention(Projections(DIM, 4), dropout=0.5)), double(BATCH, LENGTH, DIM)
        plain = by_hand(layer, x, x)
        assert not torch.allclose(layer(x), plain)
        torch.manual_seed(3)
        once = layer(x)
        torch.manual_seed(3)
        assert once.equal(layer(x))
        close(layer.eval()(x), plain)


class TestObserve:
    def test_equals_forward_and_shows_the_weights(self):
        layer = filled(Attention(Projections(DIM, 4, num_kv_heads=2), mask=masks.causal(), rotary=Rotary(2)))
        x, lens, part = double(BATCH, LENGTH, DIM), Weights(), Weights(slice(0, 2))
        seen = layer.observe(x, lens, part)
        close(seen.output, layer(x))
        close(seen[lens].sum(-1), torch.ones(BATCH, 4, LENGTH, dtype=torch.float64))
        assert not seen[lens].triu(1).any()
        assert seen[part].equal(seen[lens][..., :2, :])
        value = layer.projections.keys_and_values(x)[1].repeat_interleave(2, 1)
        close(layer.projections.project_output(seen[lens] @ value), seen.output)

    def test_of_cross_attention(self):
        layer = filled(Attention(Projections(DIM, 4, memory_dim=5)))
        x, memory, lens = double(BATCH, LENGTH, DIM), double(BATCH, 3, 5), Weights()
        seen = layer.observe(x, lens, memory=memory, mask=masks.padding(lengths=[1, 2, 3]))
        close(seen.output, layer(x, memory, mask=masks.padding(lengths=[1, 2, 3])))
        assert (seen[lens][0, ..., 0] == 1).all()

    def test_of_a_step(self):
        layer, x, lens = (
            filled(Attention(Projections(DIM, 4), mask=masks.causal())),
            double(BATCH, LENGTH, DIM),
            Weights(),
        )
        _, cache = layer.step(x[:, :4], layer.make_cache())
        seen, after = layer.observe_step(x[:, 4:], cache, lens)
        output, expected = layer.step(x[:, 4:], cache)
        close(seen.output, output)
        close(seen[lens], layer.observe(x, lens)[lens][..., 4:, :])
        assert len(after) == len(expected) == LENGTH


class TestStart:
    def test_weights_are_xavier_uniform_and_biases_0(self):
        made = Projections(96, 4, num_kv_heads=1, value_dim=5)
        for linear in (made.query, made.key, made.value, made.output):
            bound = math.sqrt(6 / sum(linear.weight.shape))
            assert linear.weight.abs().max() <= bound
            assert linear.weight.abs().max() > 0.95 * bound
            assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
            assert not linear.bias.any()

    def test_which_maps_add_a_bias(self):
        def biased(**options):
            made = Projections(DIM, 4, **options)
            return [name for name in ("query", "key", "value", "output") if getattr(made, name).bias is not None]

        assert biased() == ["query", "key", "value", "output"]
        assert biased(bias=False) == []
        assert biased(bias=["query", "value"]) == ["query", "value"]
        assert biased(bias="key") == ["key"]

    def test_a_map_may_be_replaced(self):
        layer, x = filled(Attention(Projections(DIM, 4))), double(BATCH, LENGTH, DIM)
        expected = layer(2 * x, x)
        layer.projections.query = nn.Sequential(_Doubled(), layer.projections.query)  # type: ignore[assignment]
        close(layer(x), expected)


class _Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def everything() -> Attention:
    """A layer with one of each."""
    table = nn.Parameter(torch.randn(4, 8))
    return Attention(
        Projections(DIM, 4, num_kv_heads=2, norm=RMSNorm),
        score=scores.General(3, 3),
        mask=masks.causal() & masks.window(before=4),
        bias=biases.relative(table, max_distance=9, bidirectional=False) + biases.alibi(4),
        rotary=Rotary(2),
        softcap=5.0,
        sinks=torch.randn(4),
    )


class TestModule:
    def test_state_dict_round_trip(self):
        layer, other, x = everything(), everything(), torch.randn(BATCH, LENGTH, DIM)
        assert not torch.allclose(layer(x), other(x))
        state = layer.state_dict()
        assert {"sinks", "bias.tensor_0", "score.weight", "projections.query.weight"} <= state.keys()
        assert "bias.tensor_1" not in state  # ALiBi's slopes are no parameters
        other.load_state_dict(state)
        assert layer(x).equal(other(x))

    def test_deepcopy_is_another_layer(self):
        layer, x = everything(), torch.randn(BATCH, LENGTH, DIM)
        before = layer(x)
        other = copy.deepcopy(layer)
        assert other(x).equal(before)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1.0)
        assert layer(x).equal(before)
        assert not torch.allclose(other(x), before)

    def test_deepcopy_of_a_bias_from_a_function(self):
        table = nn.Parameter(torch.randn(4, LENGTH))
        layer = Attention(
            Projections(DIM, 4), bias=biases.from_mod(lambda score, b, h, q, k: score + table[h, k], heads=4)
        )
        x = torch.randn(BATCH, LENGTH, DIM)
        other = copy.deepcopy(layer)
        assert other(x).equal(layer(x))
        before = layer(x)
        assert other.bias is not None
        with torch.no_grad():
            next(other.bias.parameters()).mul_(3.0)
        assert layer(x).equal(before)
        assert not torch.allclose(other(x), before)

    def test_it_moves_to_another_dtype(self):
        layer, x = everything().double(), double(BATCH, LENGTH, DIM)
        assert layer(x).dtype == torch.float64
        layer.bfloat16()
        assert layer(x.bfloat16()).dtype == torch.bfloat16

    def test_what_is_learned_gets_a_gradient(self):
        layer = everything()
        layer(torch.randn(BATCH, LENGTH, DIM)).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            if name != "projections.key.bias":
                assert parameter.grad.any(), name

    def test_under_torch_compile(self):
        torch.compiler.reset()
        layer, x = everything(), torch.randn(BATCH, LENGTH, DIM)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        close(compiled(x), layer(x), 1e-5)
        gradients = [
            torch.autograd.grad(call(x).square().sum(), list(layer.parameters())) for call in (compiled, layer)
        ]
        for ours, expected in zip(*gradients, strict=True):
            close(ours, expected, 1e-4)

    def test_cross_attention_under_torch_compile(self):
        torch.compiler.reset()
        layer = Attention(Projections(DIM, 4, memory_dim=5))
        x, memory, mask = torch.randn(BATCH, LENGTH, DIM), torch.randn(BATCH, 3, 5), masks.padding(lengths=[1, 2, 3])
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        close(compiled(x, memory, mask=mask), layer(x, memory, mask=mask), 1e-5)

    def test_under_autocast(self):
        layer, x = everything(), torch.randn(BATCH, LENGTH, DIM)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(x)
            stepped, _ = layer.step(x, layer.make_cache())
        assert output.dtype == torch.bfloat16
        close(output.float(), layer(x), 5e-2)
        close(stepped.float(), output.float(), 5e-2)
        output.float().sum().backward()

    def test_empty_sequences(self):
        layer = Attention(Projections(DIM, 4, memory_dim=5))
        assert layer(torch.randn(BATCH, 0, DIM), torch.randn(BATCH, 3, 5)).shape == (BATCH, 0, DIM)
        nothing = layer(torch.randn(BATCH, 2, DIM), torch.randn(BATCH, 0, 5))
        close(nothing, layer.projections.output.bias.expand(BATCH, 2, DIM), 1e-7)

    def test_repr(self):
        assert "mask=causal() & window(before=4), rotary=Rotary(dim=2" in repr(everything())
        assert "num_heads=4, num_kv_heads=2" in repr(everything())


def message(text: str) -> str:
    return re.escape(text)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"num_heads": 0}, "num_heads is 0; it needs at least 1"),
            ({"num_heads": 2.0}, "num_heads needs a whole number; it is 2.0"),
            ({"num_heads": True}, "num_heads needs a whole number; it is True"),
            ({"num_heads": 5}, "dim is 12 and num_heads 5: without head_dim each head takes dim / num_heads"),
            ({"num_heads": 4, "num_kv_heads": 3}, "num_heads is 4 and num_kv_heads 3"),
            ({"num_heads": 4, "num_kv_heads": 8}, "num_kv_heads has to divide num_heads"),
            ({"num_heads": 4, "head_dim": 0}, "head_dim is 0"),
            ({"num_heads": 4, "value_dim": -1}, "value_dim is -1"),
            ({"num_heads": 4, "memory_dim": 0}, "memory_dim is 0"),
            ({"num_heads": 4, "bias": ("key", "quary")}, "bias names 'quary'; it needs True, False or some of 'query'"),
        ],
    )
    def test_projections(self, options, text):
        with pytest.raises(ConfigurationError, match=message(text)):
            Projections(DIM, **options)

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"dropout": 1.0}, ConfigurationError, "dropout is 1.0; it needs a probability in [0, 1)"),
            ({"dropout": "0.1"}, ConfigurationError, "dropout is '0.1'"),
            ({"rotary": Rotary(4)}, ConfigurationError, "rotary turns 4 features, but heads have head_dim=3"),
            ({"sinks": torch.zeros(3)}, ShapeError, "sinks is torch.float32 (3,); it needs the first value of one"),
            ({"sinks": True}, ShapeError, "sinks is a bool"),
            ({"mask": torch.ones(3, 3).bool()}, MaskError, "masks.where(keep=tensor)"),
            ({"bias": torch.ones(3, 3).bool()}, DtypeError, "a bias needs a floating-point tensor"),
        ],
    )
    def test_layers(self, options, error, text):
        with pytest.raises(error, match=message(text)):
            Attention(Projections(DIM, 4), **options)

    @pytest.mark.parametrize(
        ("query", "error", "text"),
        [
            (torch.zeros(2, 3, 11), ShapeError, "query has the shape (2, 3, 11); it needs (batch, length, 12)"),
            (torch.zeros(3, 12), ShapeError, "pass tensor.unsqueeze(0) where there is no batch"),
            (torch.zeros(2, 3, 12).double(), DtypeError, "query is torch.float64, but the layer's parameters are"),
            (torch.zeros(2, 3, 12).int(), DtypeError, "query needs a floating-point tensor (batch, length, 12)"),
            ([[0.0] * 12], DtypeError, "it is a list"),
        ],
    )
    def test_input(self, query, error, text):
        with pytest.raises(error, match=message(text)):
            Attention(Projections(DIM, 4))(query)

    def test_device(self):
        with pytest.raises(regard.errors.DeviceError, match="query is on meta, but the layer's parameters are on cpu"):
            Attention(Projections(DIM, 4))(torch.zeros(2, 3, DIM, device="meta"))

    def test_memory(self):
        cross, own = Attention(Projections(DIM, 4, memory_dim=5)), Attention(Projections(DIM, 4))
        x = torch.zeros(2, 3, DIM)
        with pytest.raises(
            ShapeError, match=message("forward needs a memory: this layer was made for cross-attention")
        ):
            cross(x)
        with pytest.raises(ShapeError, match=message("step needs a memory")):
            cross.step(x, KVCache())
        with pytest.raises(ShapeError, match=message("memory has the shape (2, 3, 12); it needs (batch, length, 5)")):
            cross(x, x)
        with pytest.raises(ConfigurationError, match="memory_positions were passed without memory"):
            own(x, memory_positions=torch.arange(3))
        with pytest.raises(ConfigurationError, match=message("go to project_memory(memory, positions)")):
            own(x, own.project_memory(x), memory_positions=torch.arange(3))

    @pytest.mark.parametrize(
        ("positions", "error", "text"),
        [
            (torch.arange(4), ShapeError, "positions has the shape (4,); it needs (3,) or (2, 3)"),
            (torch.zeros(3, 3).long(), ShapeError, "positions has the shape (3, 3)"),
            (torch.zeros(3), DtypeError, "positions needs a tensor of whole numbers; it is torch.float32"),
            ([0, 1, 2], DtypeError, "it is a list"),
        ],
    )
    def test_positions(self, positions, error, text):
        layer, x = Attention(Projections(DIM, 4), rotary=Rotary(2)), torch.zeros(2, 3, DIM)
        with pytest.raises(error, match=message(text)):
            layer(x, positions=positions)
        with pytest.raises(error, match=message(text)):
            layer.step(x, layer.make_cache(), positions=positions)
        with pytest.raises(error, match=message("memory_" + text if text.startswith("pos") else text)):
            layer(x, x, memory_positions=positions)

    def test_masks_of_a_call(self):
        x = torch.zeros(2, 3, DIM)
        for layer in (Attention(Projections(DIM, 4)), Attention(Projections(DIM, 4), mask=masks.causal())):
            with pytest.raises(MaskError, match="bias="):
                layer(x, mask=torch.zeros(3, 3))
            with pytest.raises(MaskError, match="a mask"):
                layer(x, mask="causal")

    def test_caches(self):
        layer, x = Attention(Projections(DIM, 4), mask=masks.causal()), torch.zeros(2, 3, DIM)
        memory = layer.project_memory(x)
        assert isinstance(memory, ProjectedMemory)
        with pytest.raises(
            ConfigurationError,
            match=r"got a ProjectedMemory, which has no append, .*\. Cross-attention has no steps",
        ):
            layer.step(x, memory)  # type: ignore[arg-type]
        other = KVCache.rolling(masks.causal() & masks.window(before=3))
        with pytest.raises(
            ConfigurationError,
            match=message("the cache evicts keys by causal() & window(before=3), but the layer's own"),
        ):
            layer.step(x, other)
        layer.step(x, KVCache.rolling(masks.causal()))
