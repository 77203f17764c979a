"""Layers of linear attention: gates, steps, caches, masks, Performer's random rows; and in blocks and models."""

import copy

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.errors import ConfigurationError, DtypeError, MaskError, ShapeError
from regard.linear import (
    BonusRule,
    DecoupledDeltaRule,
    DeltaRule,
    Elu,
    FeatureDecay,
    FixedDecay,
    HeadDecay,
    Identity,
    Relu,
    SoftplusDecay,
    SoftplusFeatureDecay,
    StateSpaceRule,
    SumRule,
    UnitNorm,
    naive,
)
from regard.nn import (
    Attention,
    FeedForward,
    KVCache,
    LinearAttention,
    LinearCache,
    OutputGate,
    PerformerAttention,
    PreNorm,
    Projections,
    ShortConvolution,
    TokenShift,
    TransformerBlock,
)
from regard.positions import Rotary

DIM, HEADS, KEY_HEADS = 12, 4, 2
FIXED = torch.tensor([-0.1, -0.5])
LAYERS = {
    "elu": lambda: LinearAttention(projections(), causal=True),
    "relu, rotary": lambda: LinearAttention(projections(), feature_map=Relu(), causal=True, rotary=Rotary(2)),
    "retnet": lambda: LinearAttention(
        projections(),
        feature_map=Identity(),
        rule=SumRule(normalize=False),
        causal=True,
        decay=FixedDecay(FIXED),
        rotary=Rotary(2),
    ),
    "decay per head": lambda: LinearAttention(projections(), causal=True, decay=HeadDecay()),
    "gated": lambda: LinearAttention(
        projections(), feature_map=Identity(), rule=SumRule(normalize=False), causal=True, decay=FeatureDecay()
    ),
    "delta": lambda: LinearAttention(projections(), causal=True, rule=DeltaRule()),
    "gated delta": lambda: LinearAttention(projections(), causal=True, rule=DeltaRule(), decay=HeadDecay()),
    "decoupled delta": lambda: LinearAttention(
        projections(), causal=True, rule=DecoupledDeltaRule(), decay=SoftplusFeatureDecay(rank=2)
    ),
    "bonus": lambda: LinearAttention(projections(), causal=True, rule=BonusRule(), decay=FeatureDecay()),
    "state space": lambda: LinearAttention(projections(), causal=True, rule=StateSpaceRule(), decay=SoftplusDecay()),
    "convolved": lambda: with_parts(causal=True, decay=HeadDecay(), rotary=Rotary(2)),
    "shifted": lambda: LinearAttention(
        projections(),
        causal=True,
        rule=DeltaRule(),
        decay=HeadDecay(),
        shift=drawn_shift(),
        gate=OutputGate(projections()),
    ),
    "shifted, convolved": lambda: with_parts(causal=True, shift=drawn_shift()),
    "performer": lambda: PerformerAttention(projections(), num_features=7, causal=True),
    "performer relu": lambda: PerformerAttention(projections(), num_features=7, causal=True, kernel="relu"),
}


def projections(**given):
    return Projections(DIM, HEADS, num_kv_heads=KEY_HEADS, **given)


def drawn_shift():
    shift = TokenShift(DIM)
    torch.nn.init.uniform_(shift.weight)
    return shift


def with_parts(**given):
    own = projections()
    return LinearAttention(own, convolution=ShortConvolution(own, 3, bias=True), gate=OutputGate(own), **given)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]().eval()


def in_steps(layer, x, sizes, **call):
    outputs, cache = [], layer.make_cache()
    for part in torch.arange(x.shape[1]).split(sizes):
        now = {name: value[..., part] if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        output, cache = layer.step(x[:, part], cache, **now)
        outputs.append(output)
    return torch.cat(outputs, 1), cache


@pytest.mark.parametrize("sizes", [[9], [1] * 9, [4, 0, 3, 2]], ids=str)
def test_steps_are_the_whole(layer, sizes):
    x = torch.randn(3, 9, DIM)
    output, cache = in_steps(layer, x, sizes)
    close(output, layer(x))
    assert isinstance(cache, LinearCache)
    assert cache.next_position == 9
    assert cache.next_positions(2).tolist() == [9, 10]


def test_the_size_of_a_cache_is_constant(layer):
    x = torch.randn(3, 9, DIM)
    _, short = layer.step(x[:, :1], layer.make_cache())
    _, long = layer.step(x, layer.make_cache())
    assert layer.make_cache().nbytes == 0
    assert short.nbytes == long.nbytes > 0
    assert long.evict() is long


def test_caches_are_values_that_branch_and_reorder(layer):
    x, rows = torch.randn(3, 9, DIM), torch.tensor([2, 0, 0])
    _, cache = layer.step(x[:, :5], layer.make_cache())
    first, _ = layer.step(x[:, 5:], cache)
    layer.step(torch.randn(3, 4, DIM), cache)
    close(layer.step(x[:, 5:], cache)[0], first)
    close(layer.step(x[rows, 5:], cache.reorder(rows))[0], first[rows])
    chosen = torch.tensor([True, False, True])
    close(layer.step(x[chosen, 5:], cache.reorder(chosen))[0], first[chosen])
    assert layer.make_cache().reorder(rows).state is None
    with pytest.raises(ShapeError, match=r"rows are in 0\.\.3, but the batch has the size 3"):
        cache.reorder(torch.tensor([0, 3]))


def test_append_is_a_step_without_a_query():
    keys, values = torch.randn(2, 3, 2, 7, 4)
    cache = LinearCache().append(keys[:, :, :5], values[:, :, :5]).append(keys[:, :, 5:], values[:, :, 5:])
    _, state = regard.linear_attention_with_state(keys, keys, values, causal=True)
    assert cache.state is not None
    torch.testing.assert_close(cache.state.sums, state.sums)
    assert cache.next_position == 7
    own = LinearCache().append(keys, values, torch.tensor([[1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 9], [0] * 7]))
    assert isinstance(own.next_position, torch.Tensor)
    assert own.next_position.tolist() == [8, 10, 1]
    swapped = own.reorder(torch.tensor([1, 0])).next_position
    assert isinstance(swapped, torch.Tensor)
    assert swapped.tolist() == [10, 8]


def test_padding_on_the_left_in_steps_is_the_text_alone(layer):
    x = torch.randn(2, 9, DIM)
    positions = torch.stack([torch.arange(9), torch.arange(9) - 4])
    output, cache = in_steps(layer, x, [6, 2, 1], positions=positions, mask=~masks.prefix(0))
    close(output[0], layer(x[:1])[0])
    close(output[1, 4:], layer(x[1:, 4:])[0])
    assert cache.next_position.tolist() == [9, 5]
    close(layer(x, positions=positions, mask=~masks.prefix(0))[1, 4:], output[1, 4:])


def test_documents_are_computed_as_if_alone(layer):
    x, ids = torch.randn(2, 9, DIM), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    here = torch.arange(9) + 2
    mask = masks.documents(torch.cat([torch.tensor([9, 9]), ids]))  # one id for each position from 0
    alone = [layer(x[:, ids == document], positions=here[ids == document]) for document in range(3)]
    close(layer(x, positions=here, mask=mask), torch.cat(alone, 1))


def test_positions_have_to_increase():
    layer, x = LAYERS["elu"](), torch.randn(2, 9, DIM)
    with pytest.raises(ConfigurationError, match="positions do not increase along the sequence"):
        layer(x, positions=torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2]))


def test_gates_are_the_formulas_of_their_papers():
    layer, x = LAYERS["gated delta"](), torch.randn(2, 9, DIM)
    q = layer.projections.queries(x)
    k, v = layer.projections.keys_and_values(x)
    q, k = (tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (q, k))
    beta = torch.sigmoid(layer.beta_gate(x)).transpose(1, 2)
    decay = torch.log(torch.sigmoid(layer.decay_gate(x))).transpose(1, 2) / 16
    context, _ = naive.step_recurrence(q, k, v, decay=decay, beta=beta)
    close(layer(x), layer.projections.project_output(context))
    assert layer.feature_map == UnitNorm(Identity())
    assert not layer.normalize


def test_a_fixed_decay_is_that_of_each_head():
    layer, x = LAYERS["retnet"](), torch.randn(2, 9, DIM)
    layer.rotary = None
    q = layer.projections.queries(x)
    k, v = layer.projections.keys_and_values(x)
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    decay = FIXED[None, :, None].expand(2, 2, 9)
    context = naive.quadratic(q * 3**-0.5, k, v, keep=keep, decay=decay)
    close(layer(x), layer.projections.project_output(context))
    assert "fixed_decay" in layer.state_dict()


def test_layers_of_one_fixed_decay_are_loaded_apart():
    decay = FixedDecay(FIXED.clone())
    first, second = (LinearAttention(projections(), causal=True, decay=decay) for _ in range(2))
    first.load_state_dict({**first.state_dict(), "fixed_decay": torch.tensor([-0.3, -0.7])})
    assert first.fixed_decay is not None
    assert second.fixed_decay is not None
    assert first.fixed_decay.tolist() == torch.tensor([-0.3, -0.7]).tolist()
    assert second.fixed_decay.tolist() == decay.logarithms.tolist() == FIXED.tolist()


def test_a_decay_per_feature_is_of_the_features_that_the_map_makes():
    features = regard.linear.FavorPlus(3, 7, seed=0)
    layer = LinearAttention(projections(), causal=True, feature_map=features, decay=FeatureDecay(temperature=2.0))
    x, gate = torch.randn(2, 9, DIM), layer.get_submodule("decay_gate")
    assert gate(x).shape == (2, 9, KEY_HEADS * 7)
    q, (k, v) = layer.projections.queries(x), layer.projections.keys_and_values(x)
    decay = torch.log(torch.sigmoid(gate(x))).unflatten(-1, (KEY_HEADS, 7)).transpose(1, 2) / 2
    keep = torch.ones(9, 9, dtype=torch.bool).tril()
    context = naive.quadratic(features(q), features(k), v, keep=keep, decay=decay, normalize=True)
    close(layer(x), layer.projections.project_output(context))


OLDER = [
    (
        {"decay": FIXED},
        {"decay": FixedDecay(FIXED)},
        r"a tensor as decay .* pass decay=regard.linear.FixedDecay\(logarithms\)",
    ),
    ({"decay": "head"}, {"decay": HeadDecay()}, r"decay='head' .* pass decay=regard.linear.HeadDecay\(\)"),
    ({"decay": "feature"}, {"decay": FeatureDecay()}, r"decay='feature' .* pass decay=regard.linear.FeatureDecay\(\)"),
    ({"delta_rule": True}, {"rule": DeltaRule()}, r"delta_rule=True .* pass rule=regard.linear.DeltaRule\("),
    (
        {"delta_rule": False},
        {},
        r"delta_rule=False .* pass rule=regard.linear.SumRule\(normalize=True\)",
    ),
    (
        {"normalize": False},
        {"rule": SumRule(normalize=False)},
        r"normalize=False .* pass rule=regard.linear.SumRule\(normalize=False\)",
    ),
    ({"normalize": True}, {}, r"normalize=True .* pass rule=regard.linear.SumRule\(normalize=True\)"),
    (
        {"delta_rule": True, "normalize": False},
        {"rule": DeltaRule()},
        r"delta_rule=True and normalize=False .* pass rule=regard.linear.DeltaRule\(",
    ),
]


@pytest.mark.parametrize(("flags", "objects", "words"), OLDER, ids=lambda each: str(each)[:40])
def test_the_flags_of_earlier_versions_are_read_with_a_warning(flags, objects, words):
    with pytest.warns(FutureWarning, match=words) as found:
        old = LinearAttention(projections(), causal=True, **flags)
    assert [each.filename for each in found] == [__file__], "the warning points at who makes the layer"
    new, x = LinearAttention(projections(), causal=True, **objects), torch.randn(2, 9, DIM)
    new.load_state_dict(old.state_dict())
    assert torch.equal(new(x), old(x))
    assert repr(new) == repr(old)


STATE = {
    "elu": set(),
    "retnet": {"fixed_decay"},
    "decay per head": {"decay_gate.weight", "decay_gate.bias"},
    "gated": {"decay_gate.weight", "decay_gate.bias"},
    "delta": {"beta_gate.weight", "beta_gate.bias"},
    "gated delta": {"decay_gate.weight", "decay_gate.bias", "beta_gate.weight", "beta_gate.bias"},
}


@pytest.mark.parametrize("name", STATE)
def test_the_names_of_saved_tensors_stay(name):
    names = {key for key in LAYERS[name]().state_dict() if not key.startswith("projections.")}
    assert names == STATE[name]


def test_a_layer_shows_its_decay_and_its_rule():
    assert "decay=None, rule=SumRule(normalize=True)" in repr(LAYERS["elu"]())
    assert "decay=HeadDecay(temperature=16.0), rule=DeltaRule(largest=1.0)" in repr(LAYERS["gated delta"]())
    assert "decay=FixedDecay(...), rule=SumRule(normalize=False)" in repr(LAYERS["retnet"]())
    assert LAYERS["elu"]().feature_map == Elu()


def test_every_parameter_learns(layer):
    x = torch.randn(2, 9, DIM, requires_grad=True)
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    # The additive bias of keys cancels nowhere here, as it would in softmax attention.
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_copied_saved_and_loaded(name):
    layer, other = LAYERS[name]().eval(), LAYERS[name]().eval()
    x = torch.randn(2, 9, DIM)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_attention_to_a_memory():
    layer = LinearAttention(projections(memory_dim=5)).eval()
    x, memory = torch.randn(2, 9, DIM), torch.randn(2, 4, 5)
    output = layer(x, memory, mask=masks.padding([4, 2]))
    close(output[1:], layer(x[1:], memory[1:, :2]))
    with pytest.raises(ShapeError, match="needs a memory: the projections have memory_dim=5"):
        layer(x)
    rotated = LinearAttention(projections(memory_dim=5), rotary=Rotary(2))
    assert rotated(x, memory).shape == x.shape


def test_performer_rows_are_redrawn_and_caches_keep_theirs():
    layer, x = LAYERS["performer"]().eval(), torch.randn(2, 9, DIM)
    before = layer(x)
    _, cache = layer.step(x[:, :5], layer.make_cache())
    layer.redraw(5)
    assert not torch.equal(layer(x), before)
    close(layer.step(x[:, 5:], cache)[0], before[:, 5:])
    again = layer.matrix.clone()
    layer.redraw(5)
    assert torch.equal(layer.matrix, again)
    layer.redraw()
    assert not torch.equal(layer.matrix, again)


def test_performer_comes_close_to_attention_with_the_same_weights():
    exact = Attention(Projections(DIM, 2)).double()
    performer = PerformerAttention(Projections(DIM, 2), num_features=20_000, seed=0).double()
    performer.projections.load_state_dict(exact.projections.state_dict())
    x = 0.2 * torch.randn(2, 9, DIM, dtype=torch.float64)  # large ones need many more features
    torch.testing.assert_close(performer(x), exact(x), atol=3e-3, rtol=0)


def test_half_precision(layer):
    half, x = copy.deepcopy(layer).bfloat16(), torch.randn(2, 9, DIM)
    output = half(x.bfloat16())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), atol=0.1, rtol=0.1)
    with pytest.raises(DtypeError, match="query is torch.float64, but the layer's parameters are torch.float32"):
        layer(x.double())


def test_mixed_with_softmax_in_blocks(layer):
    blocks = [
        TransformerBlock(one, FeedForward(DIM, 5), lambda: PreNorm(nn.LayerNorm(DIM))).eval()
        for one in (layer, Attention(projections(), mask=masks.causal()))
    ]
    x = torch.randn(3, 9, DIM)
    whole = blocks[1](blocks[0](x))
    caches, outputs = [block.make_cache() for block in blocks], []
    for token in x.split([4, 1, 1, 3], dim=1):
        for index, block in enumerate(blocks):
            token, caches[index] = block.step(token, caches[index])
        outputs.append(token)
    close(torch.cat(outputs, 1), whole)
    assert isinstance(caches[0].attention, LinearCache)
    assert isinstance(caches[1].attention, KVCache)


@pytest.mark.parametrize("name", ["elu", "gated delta", "performer"])
def test_compiled(name):
    layer, x = LAYERS[name]().eval(), torch.randn(2, 9, DIM)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    close(compiled(x), layer(x))
    compiled(x).sum().backward()
    found = {key: parameter.grad.clone() for key, parameter in layer.named_parameters()}
    layer.zero_grad()
    layer(x).sum().backward()
    for key, parameter in layer.named_parameters():
        close(found[key], parameter.grad)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: LinearAttention(projections(), decay=HeadDecay()),
            ConfigurationError,
            r"decay=HeadDecay\(temperature=16.0\) needs an order of the tokens: make the layer with causal=True",
        ),
        (
            lambda: LinearAttention(projections(), rule=DeltaRule()),
            ConfigurationError,
            r"rule=DeltaRule\(largest=1.0\) needs an order of the tokens: make the layer with causal=True",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, rule="delta"),  # type: ignore[arg-type]
            ConfigurationError,
            r"rule is 'delta'; it needs SumRule\(\), DeltaRule\(\) or another of regard.linear",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, rule=DeltaRule(), normalize=True),
            ConfigurationError,
            r"rule=DeltaRule\(largest=1.0\) takes the place of normalize=True: pass the rule alone",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, rule=SumRule(), delta_rule=True, normalize=False),
            ConfigurationError,
            r"rule=SumRule\(normalize=True\) takes the place of delta_rule=True and normalize=False",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, delta_rule=True, normalize=True),
            ConfigurationError,
            "no sum to divide by",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, decay="heads"),
            ConfigurationError,
            r"decay is 'heads'; it needs FixedDecay\(logarithms\), HeadDecay\(\) or another of regard.linear",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, decay=HeadDecay),  # type: ignore[arg-type]
            ConfigurationError,
            r"decay is <class .*HeadDecay'>; it needs FixedDecay",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, decay=FixedDecay(torch.zeros(3))),
            ShapeError,
            "decay has 3 logarithms; it needs one for each of 2 key heads",
        ),
        (
            lambda: LinearAttention(projections(memory_dim=3), causal=True),
            ConfigurationError,
            "a causal layer attends to its own sequence alone",
        ),
        (lambda: LinearAttention(projections(), rotary=Rotary(4)), ConfigurationError, "rotary turns 4 features"),
        (lambda: PerformerAttention(projections(), num_features=0), ConfigurationError, "num_features is 0"),
        (lambda: LinearAttention(projections()).make_cache(), ConfigurationError, "not causal cannot decode token by"),
    ],
)
def test_bad_layers(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_calls():
    layer, x = LAYERS["elu"](), torch.randn(2, 9, DIM)
    with pytest.raises(ConfigurationError, match="linear attention has no bias"):
        layer(x, bias=regard.biases.alibi(HEADS))
    with pytest.raises(ConfigurationError, match="attends to its own sequence alone"):
        layer(x, x)
    with pytest.raises(MaskError, match=r"window\(before=3\) is no mask for linear attention"):
        layer(x, mask=masks.window(before=3))
    with pytest.raises(ConfigurationError, match="step needs a LinearCache.*got a KVCache"):
        layer.step(x, KVCache())
    with pytest.raises(MaskError, match="several documents in one sequence"):
        layer.step(x, layer.make_cache(), mask=masks.documents([0] * 9))
    with pytest.raises(ConfigurationError, match="the layer has no rotary embedding"):
        layer(x, rotation=Rotary(2).rotation(torch.arange(9)))
    with pytest.raises(ConfigurationError, match="a decoding step of linear attention has the sums of earlier keys"):
        layer.observe_step(x, layer.make_cache(), regard.lenses.Entropy())
    with pytest.raises(ConfigurationError, match=r"torch.jit.script cannot compile regard.nn.LinearAttention"):
        layer.__prepare_scriptable__()
