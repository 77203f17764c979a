"""Adaptive spans against their formula in float64: weights that fall to 0 along a ramp, and gradients of the spans."""

import pytest
import torch

import regard
from regard import biases, masks, native
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.lenses import Weights

SPANS, RAMP = (0.3, 3.4, 17.7, 90.1), 5.0


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(queries, keys, dtype):
    """Query, key, value and spans, with two query heads for each key head."""
    tensors = drawn(2, 4, queries, 8), drawn(2, 2, keys, 8, seed=1), drawn(2, 2, keys, 8, seed=2), torch.tensor(SPANS)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def formula(query, key, value, spans, *, causal, offset=0):
    """m e^s / Σ m e^s, 0 for a query without keys; the first query is at position N - M + offset."""
    queries, keys = query.shape[-2], key.shape[-2]
    distance = torch.arange(keys - queries, keys)[:, None] + offset - torch.arange(keys)
    share = ((RAMP + spans[:, None, None] - distance.abs()) / RAMP).clamp(0, 1)
    share = share * (distance >= 0) if causal else share
    terms = share * (8**-0.5 * query @ key.repeat_interleave(2, 1).mT).exp()
    total = terms.sum(-1, keepdim=True)
    weights = torch.where(total > 0, terms / torch.where(total > 0, total, 1.0), 0.0)
    return weights @ value.repeat_interleave(2, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(37, 53), (53, 53), (131, 613)])
@pytest.mark.parametrize("kernel", [None, "reference", "tiled", "cpu_flash", "short"])
def test_output_and_gradients_are_those_of_the_formula(kernel, queries, keys, causal):
    if kernel in ("cpu_flash", "short") and not native.available():
        pytest.skip("there is no native code")
    if kernel == "short" and keys > 512:
        keys = 509
    mask = masks.causal() if causal else None
    exact = inputs(queries, keys, torch.float64)
    expected = formula(*exact, causal=causal)
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for dtype, within in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        if kernel in ("cpu_flash", "short") and dtype == torch.float64:
            continue
        own = inputs(queries, keys, dtype)
        output = regard.attention(*own[:3], mask=mask, bias=biases.adaptive_span(own[3], RAMP), kernel=kernel)
        assert (output - expected).abs().max() < within
        for mine, theirs in zip(torch.autograd.grad(output.square().sum(), own), wanted, strict=True):
            assert (mine - theirs).abs().max() < within * theirs.abs().max()


@pytest.mark.parametrize("kernel", [None, "reference", "tiled"])
def test_a_query_whose_keys_are_all_beyond_the_span_has_output_0_and_no_nan_in_gradients(kernel):
    query, key, value, spans = inputs(37, 53, torch.float64)
    options = {"query_positions": range(16 + 43, 53 + 43), "kernel": kernel}
    output = regard.attention(query, key, value, bias=biases.adaptive_span(spans, RAMP), **options)
    assert output[:, 0].eq(0).all()
    assert not output[:, 3].eq(0).any()
    expected = formula(query, key, value, spans, causal=False, offset=43)
    torch.testing.assert_close(output, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (query, key, value, spans))
    for mine, theirs in zip(
        torch.autograd.grad(output.square().sum(), (query, key, value, spans)), wanted, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_window_of_its_reach_leaves_every_weight():
    query, key, value, spans = inputs(67, 131, torch.float64)
    bias = biases.adaptive_span(spans, RAMP)
    assert bias.reach == 95  # 90.1 + 5 - 95 > 0
    near = masks.causal() & masks.window(before=bias.reach)
    torch.testing.assert_close(
        regard.attention(query, key, value, mask=near, bias=bias),
        regard.attention(query, key, value, mask=masks.causal(), bias=bias),
    )
    weights = Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal(), bias=bias)[weights]
    assert seen[:, 3].diagonal(131 - 67 - 95, -2, -1).gt(0).all()
    assert seen[:, 3].tril(131 - 67 - 96).eq(0).all()


@pytest.mark.parametrize(("spans", "reach"), [([3.0], 6), ([-9.0], 0), ([2.5, 7.25], 11)])
def test_reach_is_the_farthest_distance_with_weight(spans, reach):
    bias = biases.adaptive_span(torch.tensor(spans), 4.0)
    assert bias.reach == reach
    weight = bias.values_at(torch.arange(-50, 1)).exp().amax(0)
    assert reach == 0 or weight.flip(0).nonzero().max() == reach


def test_spans_of_thousands_keep_their_ramp_in_float32():
    far = biases.adaptive_span(torch.tensor([8192.3]), 32.0).values_at(-torch.arange(8192, 8225))
    span = torch.tensor([8192.3]).double()  # as float32 holds it
    share = ((32.0 + span - torch.arange(8192, 8225)) / 32.0).clamp(0, 1)
    assert (far.exp() - share).abs().max() < 2 * torch.finfo(torch.float32).eps


def test_a_span_grows_where_far_keys_help():
    """A head that has to copy the token 6 before its own learns to look so far."""
    torch.manual_seed(0)
    value, spans = torch.randn(1, 1, 61, 4), torch.nn.Parameter(torch.tensor([0.5]))
    query = key = torch.zeros(1, 1, 61, 4)
    wanted = torch.stack([value[..., max(i - 6, 0), :] for i in range(61)], -2)
    optimizer = torch.optim.SGD([spans], lr=2.0)
    for _ in range(60):
        output = regard.attention(query, key, value, mask=masks.causal(), bias=biases.adaptive_span(spans, 8.0))
        loss = (output - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert spans.item() > 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: biases.adaptive_span(torch.ones(2).long(), 4.0),
            DtypeError,
            "floating-point spans, one for each head",
        ),
        (lambda: biases.adaptive_span(4.0, 4.0), DtypeError, "this is a float"),  # pyright: ignore[reportArgumentType]
        (lambda: biases.adaptive_span(torch.ones(2, 1), 4.0), ShapeError, r"shape \(heads,\); this one has \(2, 1\)"),
        (lambda: biases.adaptive_span(torch.ones(2), 0.0), ConfigurationError, "a ramp of more than 0 positions.* 0.0"),
        (lambda: biases.adaptive_span(torch.ones(2), float("nan")), ConfigurationError, "it is nan"),
    ],
)
def test_arguments_that_do_not_fit_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_spans_of_another_number_of_heads_are_refused():
    query, key, value, _ = inputs(7, 11, torch.float64)
    with pytest.raises(ShapeError, match="heads"):
        regard.attention(query, key, value, bias=biases.adaptive_span(torch.ones(3), 4.0))
