"""Parts of layers, each against its formula: convolution, gates, norms, grouped values, and rules that need them."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import regard
from regard import masks
from regard.errors import ConfigurationError, MaskError
from regard.linear import (
    BonusRule,
    DecoupledDeltaRule,
    DeltaRule,
    FixedDecay,
    GeneralizedDeltaRule,
    HeadDecay,
    Identity,
    SigmoidFeatureDecay,
    SoftplusDecay,
    SoftplusFeatureDecay,
    StateSpaceRule,
    UpdateRule,
    naive,
)
from regard.linear.update_rules import RuleTokens
from regard.nn import (
    Attention,
    BranchNorm,
    GatedGroupNorm,
    GroupedValueProjections,
    L2Norm,
    LinearAttention,
    LinearCache,
    OutputGate,
    Projections,
    RMSNorm,
    ShortConvolution,
    TokenShift,
    WholeNormProjections,
)

DIM, HEADS, KEY_HEADS, LENGTH = 12, 4, 2, 17


def projections(**given):
    return Projections(DIM, HEADS, num_kv_heads=KEY_HEADS, **given).double()


def layer_of(rule, decay=None, make_convolution=None):
    own = projections()
    convolution = None if make_convolution is None else make_convolution(own)
    layer = LinearAttention(own, causal=True, feature_map=Identity(), rule=rule, decay=decay, convolution=convolution)
    return layer.double().eval()


def given(parameter):
    assert parameter is not None
    return parameter


def heads(layer, x):
    return layer.projections.queries(x) * 3**-0.5, *layer.projections.keys_and_values(x)


def logits(gate, x):
    return gate(x).unflatten(-1, (KEY_HEADS, -1)).transpose(1, 2)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, DIM, dtype=torch.float64)


def test_a_decoupled_delta_rule_removes_and_writes_by_gates_of_their_own(x):
    layer = layer_of(DecoupledDeltaRule(largest=1.5), decay=SoftplusFeatureDecay())
    q, k, v = heads(layer, x)
    gates = logits(layer.beta_gate, x).sigmoid()
    erase, write = gates[..., :3], gates[..., 3:]
    rates = given(layer.log_decay_rates).exp()[:, None, None]
    decay = -rates * functional.softplus(logits(layer.decay_gate, x))
    ones = torch.ones_like(k[..., 0])
    context, _ = naive.step_recurrence(q, k, write * v, decay=decay, beta=ones, removal=1.5 * erase * k)
    torch.testing.assert_close(layer(x), layer.projections.project_output(context))


def test_a_bonus_weighs_the_own_value(x):
    layer = layer_of(BonusRule(), decay=HeadDecay())
    given(layer.rule_constants).copy_(torch.randn(KEY_HEADS, 3))
    q, k, v = heads(layer, x)
    decay = functional.logsigmoid(logits(layer.decay_gate, x).squeeze(-1)) / 16
    state, rows = torch.zeros(2, KEY_HEADS, 3, 3, dtype=torch.float64), []
    for t in range(LENGTH):
        added = k[:, :, t, :, None] * v[:, :, t, None]
        read = state + given(layer.rule_constants)[:, :, None] * added
        rows.append(q[:, :, t, None] @ read.repeat_interleave(2, 1))
        state = decay[:, :, t, None, None].exp() * state + added
    torch.testing.assert_close(layer(x), layer.projections.project_output(torch.cat(rows, 2)))


def rows_of_rwkv7(layer, x, decay):
    """S_t = (diag(w_t) - (a_t κ_t) κ_tᵀ) S_{t-1} + k_t v_tᵀ and o_t = S_tᵀ q_t, token by token; decay is log w."""
    q, k, v = layer.projections.queries(x), *layer.projections.keys_and_values(x)
    rate = logits(layer.beta_gate, x).sigmoid()
    xi, alpha = given(layer.rule_constants)[:, :, None].unbind(1)
    removed = k * xi / (k * xi).norm(dim=-1, keepdim=True)
    written = k * (1 + (rate - 1) * alpha)
    state, rows = torch.zeros(len(x), KEY_HEADS, 3, 3, dtype=torch.float64), []
    for t in range(x.shape[1]):
        kept = torch.diag_embed(decay[:, :, t].exp()) - (rate * removed)[:, :, t, :, None] * removed[:, :, t, None]
        state = kept @ state + written[:, :, t, :, None] * v[:, :, t, None]
        rows.append(q[:, :, t, None] @ state.repeat_interleave(2, 1))
    return layer.projections.project_output(torch.cat(rows, 2))


def rwkv7(decay):
    layer = layer_of(GeneralizedDeltaRule(), decay=decay)
    given(layer.rule_constants).copy_(torch.randn(KEY_HEADS, 2, 3))
    return layer


def test_the_generalised_delta_rule_is_the_formula_of_rwkv7(x):
    layer = rwkv7(SigmoidFeatureDecay(rank=5))
    decay = -math.exp(-0.5) * logits(layer.decay_gate, x).sigmoid()
    expected = rows_of_rwkv7(layer, x, decay)
    torch.testing.assert_close(layer(x), expected)
    cache, rows = layer.make_cache(), []
    for part in x.split([1, 5, 1, 10], 1):
        row, cache = layer.step(part, cache)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), expected)
    assert cache.next_position == LENGTH
    short = layer.float()(x.float())
    assert (short.double() - expected).abs().max() < 40 * torch.finfo(torch.float32).eps * expected.abs().max()


@pytest.mark.parametrize("decay", [None, FixedDecay(torch.tensor([-0.25, -0.125])), HeadDecay()], ids=str)
def test_the_generalised_delta_rule_with_other_decays_and_padding(x, decay):
    layer = rwkv7(decay)
    own = torch.zeros(2, KEY_HEADS, LENGTH, 1, dtype=torch.float64)
    if isinstance(decay, FixedDecay):
        own = own + decay.logarithms.double()[:, None, None]
    if isinstance(decay, HeadDecay):
        own = functional.logsigmoid(logits(layer.decay_gate, x)) / 16
    keep = torch.arange(LENGTH) >= torch.tensor([0, 4])[:, None, None, None]
    found = layer(x, mask=masks.where(keep=keep))
    expected = rows_of_rwkv7(layer, x[1:, 4:], own[1:, :, 4:].expand(-1, -1, -1, 3))
    torch.testing.assert_close(found[1:, 4:], expected)
    torch.testing.assert_close(found[:1], rows_of_rwkv7(layer, x[:1], own[:1].expand(-1, -1, -1, 3)))


def test_gradients_of_the_generalised_delta_rule(x):
    layer = rwkv7(SigmoidFeatureDecay())
    with torch.enable_grad():
        decay = -math.exp(-0.5) * logits(layer.decay_gate, x).sigmoid()
        parameters = list(layer.parameters())
        found, expected = (
            torch.autograd.grad(output.sin().sum(), parameters) for output in (layer(x), rows_of_rwkv7(layer, x, decay))
        )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_what_the_generalised_delta_rule_refuses(x):
    own = projections()
    layer = LinearAttention(own, causal=True, feature_map=regard.linear.Elu(), rule=GeneralizedDeltaRule()).double()
    with pytest.raises(
        ConfigurationError, match=r"feature_map is Elu\(\); the keys of GeneralizedDeltaRule\(\) are norms"
    ):
        layer(x)
    with pytest.raises(ConfigurationError, match="takes 2 steps, so that no pair of tokens has one weight"):
        rwkv7(None).observe(x, regard.lenses.Received())


def test_a_state_space_adds_steps_of_values_and_skips(x):
    layer = layer_of(StateSpaceRule(), decay=SoftplusDecay())
    given(layer.rule_constants).copy_(torch.randn(KEY_HEADS))
    q, k, v = heads(layer, x)
    step = functional.softplus(logits(layer.decay_gate, x))
    decay = -given(layer.log_decay_rates).exp()[:, None] * step.squeeze(-1)
    context, _ = naive.step_recurrence(q * 3**0.5, k, step * v, decay=decay)
    context = context + (given(layer.rule_constants)[:, None, None] * v).repeat_interleave(2, 1)
    torch.testing.assert_close(layer(x), layer.projections.project_output(context))


def test_a_rule_of_ones_own(x):
    class Halved(UpdateRule):
        def write(self, tokens: RuleTokens):
            return tokens.value / 2, {}

        def finish(self, output, tokens):
            return 4 * output

    halved, plain = layer_of(Halved()), layer_of(regard.linear.SumRule(normalize=False))
    halved.load_state_dict(plain.state_dict())
    bias = plain.projections.output.bias
    torch.testing.assert_close(halved(x) - bias, 2 * (plain(x) - bias))


def test_softplus_decays_start_slow_and_fast():
    layer = LinearAttention(Projections(64, 32), causal=True, decay=SoftplusDecay())
    rates = given(layer.log_decay_rates).exp()
    steps = functional.softplus(layer.decay_gate.bias)  # type: ignore[union-attr, arg-type]
    assert 1 <= float(rates.min()) < 4 < 12 < float(rates.max()) <= 16
    assert 0.00099 < float(steps.min()) < 0.01 < 0.03 < float(steps.max()) < 0.101


@pytest.mark.parametrize("activation", [None, functional.silu])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 4])
def test_a_convolution_is_that_of_torch(width, bias, activation):
    convolution = ShortConvolution(projections(), width, activation=activation, bias=bias).double()
    features = (HEADS + 2 * KEY_HEADS) * 3
    rows = torch.randn(2, LENGTH, features, dtype=torch.float64)
    if bias:
        nn.init.normal_(convolution.bias)  # type: ignore[arg-type]
    weight = convolution.weight.unsqueeze(1)
    expected = functional.conv1d(rows.mT, weight, convolution.bias, padding=width - 1, groups=features)[..., :LENGTH].mT
    expected = expected if activation is None else activation(expected)
    torch.testing.assert_close(convolution(rows), expected)
    first, rest = rows[:, :2], rows[:, 2:]
    tail = convolution.tail(first)
    assert tail.shape == (2, width - 1, features)
    torch.testing.assert_close(torch.cat([convolution(first), convolution(rest, tail)], 1), expected)
    torch.testing.assert_close(convolution.tail(rest, tail), convolution.tail(rows))


def test_a_shift_mixes_what_each_map_reads(x):
    shift, own = TokenShift(DIM).double(), projections()
    nn.init.uniform_(shift.weight)
    layer = LinearAttention(
        own,
        feature_map=Identity(),
        causal=True,
        rule=DeltaRule(),
        decay=HeadDecay(),
        shift=shift,
        gate=OutputGate(own),
    ).double()
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    query, key, value, decay, rule, gate = (x + share * (before - x) for share in shift.weight)
    q, (k, _), (_, v) = own.queries(query) * 3**-0.5, own.keys_and_values(key), own.keys_and_values(value)
    decay = functional.logsigmoid(logits(layer.decay_gate, decay).squeeze(-1)) / 16
    beta = logits(layer.beta_gate, rule).sigmoid().squeeze(-1)
    context, _ = naive.step_recurrence(q, k, v, decay=decay, beta=beta)
    assert layer.gate is not None
    gated = context.transpose(1, 2).flatten(-2) * functional.silu(layer.gate.gate(gate))
    torch.testing.assert_close(layer(x), own.output(gated))


def test_masked_tokens_are_zeros_of_a_convolution(x):
    layer = layer_of(DeltaRule(), make_convolution=ShortConvolution)
    keep = torch.rand(2, LENGTH) > 0.3
    found = layer(x, mask=keep[:, None, None])
    poisoned = x.masked_fill(~keep.unsqueeze(-1), torch.nan)
    torch.testing.assert_close(layer(poisoned, mask=keep[:, None, None])[keep], found[keep])
    rows = torch.cat([getattr(layer.projections, name)(x) for name in ("query", "key", "value")], -1)
    assert layer.convolution is not None
    rows = layer.convolution(rows.where(keep.unsqueeze(-1), 0.0))
    q, k, v = (part.unflatten(-1, (-1, 3)).transpose(1, 2) for part in rows.split([12, 6, 6], -1))
    beta = logits(layer.beta_gate, x).sigmoid().squeeze(-1)
    k = k.where(keep[:, None, :, None], 0.0)
    context, _ = naive.step_recurrence(q * 3**-0.5, k, v, beta=beta)
    torch.testing.assert_close(found[keep], layer.projections.project_output(context)[keep])


@pytest.mark.parametrize("rank", [None, 3])
def test_a_gate_of_softmax_attention(x, rank):
    own = projections()
    layer = Attention(own, mask=masks.causal(), gate=OutputGate(own, activation=torch.sigmoid, rank=rank)).double()
    plain = Attention(own, mask=masks.causal()).double()
    assert layer.gate is not None
    gate = layer.gate.gate(x).sigmoid()
    context = regard.attention(own.queries(x), *own.keys_and_values(x), mask=masks.causal())
    expected = own.output(context.transpose(1, 2).flatten(-2) * gate)
    torch.testing.assert_close(layer(x), expected)
    cache, outputs = layer.make_cache(), []
    for token in x.split(5, 1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
    lens = regard.lenses.Weights()
    seen = layer.observe(x, lens)
    torch.testing.assert_close(seen.output, expected)
    torch.testing.assert_close(seen[lens], plain.observe(x, lens)[lens])


def test_a_gate_after_a_norm_and_a_norm_after_a_gate(x):
    own = projections(value_dim=5)
    context, before = torch.randn(2, HEADS, LENGTH, 5, dtype=torch.float64), OutputGate(own, norm=RMSNorm).double()
    gate = functional.silu(before.gate(x)).unflatten(-1, (HEADS, 5)).transpose(1, 2)
    torch.testing.assert_close(before(context, x), functional.rms_norm(context, (5,), eps=1e-6) * gate)
    after = GatedGroupNorm(own, groups=2, eps=1e-3).double()
    nn.init.normal_(after.weight)
    gate = functional.silu(after.gate(x)).unflatten(-1, (HEADS, 5)).transpose(1, 2)
    rows = (context * gate).transpose(1, 2).reshape(2, LENGTH, 2, 10)
    rows = functional.rms_norm(rows, (10,), eps=1e-3).reshape(2, LENGTH, HEADS, 5).transpose(1, 2) * after.weight
    torch.testing.assert_close(after(context, x), rows)


def test_norms_of_units_and_of_all_heads(x):
    vectors = torch.randn(7, 5, dtype=torch.float64) * 1e-3
    expected = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(L2Norm(5)(vectors), expected)
    whole = WholeNormProjections(DIM, HEADS, num_kv_heads=KEY_HEADS, norm=RMSNorm).double()
    nn.init.normal_(whole.query_norm.weight)  # type: ignore[arg-type]
    queries = functional.rms_norm(whole.query(x), (12,), eps=1e-6) * whole.query_norm.weight
    torch.testing.assert_close(whole.queries(x), queries.unflatten(-1, (HEADS, 3)).transpose(1, 2))
    keys = functional.rms_norm(whole.key(x), (6,), eps=1e-6).unflatten(-1, (KEY_HEADS, 3)).transpose(1, 2)
    torch.testing.assert_close(whole.keys_and_values(x)[0], keys)
    residual = BranchNorm(nn.LayerNorm(DIM).double())
    torch.testing.assert_close(residual.after(x, 2 * residual.before(x)), x + functional.layer_norm(2 * x, (DIM,)))


def test_a_norm_of_all_heads_after_a_convolution(x):
    own = WholeNormProjections(DIM, HEADS, num_kv_heads=KEY_HEADS, norm=RMSNorm).double()
    convolution = ShortConvolution(own, 1, activation=None).double()
    nn.init.ones_(convolution.weight)  # the rows as they are
    plain, convolved = (
        LinearAttention(own, feature_map=Identity(), causal=True, rule=DeltaRule(), convolution=part).double()
        for part in (None, convolution)
    )
    convolved.load_state_dict(plain.state_dict() | {"convolution.weight": convolution.weight})
    torch.testing.assert_close(convolved(x), plain(x))


def test_values_of_more_heads_than_keys(x):
    own = GroupedValueProjections(DIM, 4, num_key_heads=2, head_dim=5, value_dim=3).double()
    keys, values = own.keys_and_values(x)
    assert (keys.shape, values.shape) == ((2, 4, LENGTH, 5), (2, 4, LENGTH, 3))
    torch.testing.assert_close(keys[:, 1], own.key(x)[..., :5])
    torch.testing.assert_close(own.queries(x)[:, 2], own.query(x)[..., 5:])
    softmax = Attention(own).double()
    context = regard.attention(own.queries(x), keys, values)
    torch.testing.assert_close(softmax(x), own.project_output(context))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: LinearAttention(projections(), convolution=ShortConvolution(projections())),
            ConfigurationError,
            r"convolution=ShortConvolution\(features=24, width=4, activation=silu\) needs an order of the tokens",
        ),
        (lambda: ShortConvolution(projections(), 0), ConfigurationError, "width is 0"),
        (lambda: TokenShift(0), ConfigurationError, "dim is 0"),
        (
            lambda: LinearAttention(projections(), shift=TokenShift(DIM)),
            ConfigurationError,
            r"shift=TokenShift\(12\) needs an order of the tokens",
        ),
        (
            lambda: LinearAttention(projections(), causal=True, rule=StateSpaceRule(), decay=HeadDecay()),
            ConfigurationError,
            r"reads the step of a decay: make the layer with decay=regard.linear.SoftplusDecay\(\)",
        ),
        (lambda: OutputGate(projections(), rank=0), ConfigurationError, "rank is 0"),
        (lambda: GatedGroupNorm(projections(), groups=3), ConfigurationError, "groups is 3 and the layer has 4 heads"),
        (
            lambda: GroupedValueProjections(12, 4, num_key_heads=3),
            ConfigurationError,
            "num_heads is 4 and num_key_heads 3: each query and key serves as many values",
        ),
        (lambda: L2Norm(3, eps=-1.0), ConfigurationError, "eps is -1.0; it needs a number of at least 0"),
        (lambda: DeltaRule(largest=2.5), ConfigurationError, "largest is 2.5; it needs a number above 0 and at most 2"),
        (lambda: SigmoidFeatureDecay(most=0.0), ConfigurationError, "most is 0.0; it needs a finite number above 0"),
        (lambda: DecoupledDeltaRule(largest=0.0), ConfigurationError, "largest is 0.0; it needs a number above 0"),
    ],
)
def test_bad_parts(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_calls_of_a_layer_with_a_convolution(x):
    layer = layer_of(DeltaRule(), make_convolution=ShortConvolution)
    keep = torch.ones(2, KEY_HEADS, 1, LENGTH, dtype=torch.bool)
    with pytest.raises(MaskError, match="the mask says for 2 heads which tokens exist, and a convolution or shift"):
        layer(x, mask=keep)
    cache = LinearCache(layer.feature_map, False, tail=torch.zeros(2, 1, 24))
    with pytest.raises(
        ConfigurationError, match=r"the cache has \(1, 24\) rows and features .* this one needs \(3, 24\)"
    ):
        layer.step(x, cache)
