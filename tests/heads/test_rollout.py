"""Rollout and flow against their definitions."""

import itertools

import pytest
import torch

import regard
from regard import heads, masks
from regard.errors import ConfigurationError, ShapeError
from regard.heads import rollout


def layers(count, tokens, number=2, sharpness=2.0):
    return [(sharpness * torch.randn(number, tokens, tokens)).softmax(-1) for _ in range(count)]


def test_rollout_is_the_product_of_half_and_half():
    weights = layers(3, 5)
    first, second, third = (0.5 * layer.mean(0) + 0.5 * torch.eye(5) for layer in weights)
    torch.testing.assert_close(heads.attention_rollout(weights), third @ second @ first)
    torch.testing.assert_close(heads.attention_rollout(weights).sum(-1), torch.ones(5))
    bare = weights[1].mean(0) @ weights[0].mean(0)
    torch.testing.assert_close(heads.attention_rollout(weights[:2], residual=0.0), bare)


def test_rollout_of_sources_is_rollout_without_its_matrix():
    queries, keys = torch.randn(3, 2, 4, 7, 5), torch.randn(3, 2, 2, 7, 5)
    whole = regard.lenses.Weights()
    weights = [regard.observe(q, k, k, whole, mask=masks.causal())[whole] for q, k in zip(queries, keys, strict=True)]
    calls = list(zip(queries, keys, strict=True))
    rolled = heads.rollout_from_sources(torch.eye(7).expand(2, 7, 7), calls, mask=masks.causal(), residual=0.3)
    torch.testing.assert_close(rolled, heads.attention_rollout(weights, residual=0.3))
    segments = torch.zeros(2, 7, 2)
    segments[:, :3, 0], segments[:, 3:, 1] = 1, 1
    rolled = heads.rollout_from_sources(segments, calls, mask=masks.causal())
    torch.testing.assert_close(rolled, heads.attention_rollout(weights) @ segments)


def minimum_cut(mixed, output, source):
    """The minimum cut between an output and an input, by enumeration of all cuts: it equals the maximum flow."""
    depth, tokens = len(mixed), len(mixed[0])
    start, end = depth * tokens + output, source
    others = [node for node in range((depth + 1) * tokens) if node not in (start, end)]
    least = float("inf")
    for chosen in itertools.product((False, True), repeat=len(others)):
        side = {start: True, end: False, **dict(zip(others, chosen, strict=True))}
        cut = sum(
            float(layer[above, below])
            for number, layer in enumerate(mixed)
            for above in range(tokens)
            for below in range(tokens)
            if side[(number + 1) * tokens + above] and not side[number * tokens + below]
        )
        least = min(least, cut)
    return least


@pytest.mark.parametrize(("depth", "tokens"), [(1, 4), (2, 3), (4, 2)])
def test_the_flow_is_the_least_cut(depth, tokens):
    weights = [layer.double() for layer in layers(depth, tokens, sharpness=3.0)]
    mixed = [0.5 * layer.mean(0) + 0.5 * torch.eye(tokens) for layer in weights]
    shown = heads.attention_flow(weights)
    for output in range(tokens):
        for source in range(tokens):
            assert shown[output, source].item() == pytest.approx(minimum_cut(mixed, output, source), abs=1e-9)


def test_a_first_way_that_was_wrong_is_taken_back():
    """A greedy path that blocks the rest is undone by its reverse edges."""
    top = torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    middle = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    bottom = torch.tensor([[0.5, 0.0, 0.5], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]])
    shown = heads.attention_flow([layer[None] for layer in (bottom, middle, top)], outputs=[0], residual=0.0)
    assert shown.tolist() == [[1.0, 0.0, 1.0]]


def test_more_flows_than_rolls():
    weights = layers(4, 7)
    shown = heads.attention_flow(weights)
    assert (shown >= heads.attention_rollout(weights) - 1e-6).all()
    assert (shown <= 1 + 1e-6).all()


def test_some_outputs_are_rows_of_all():
    weights = layers(3, 6)
    whole = heads.attention_flow(weights)
    assert heads.attention_flow(weights, outputs=[-1, 2]).equal(whole[[5, 2]])


def test_nothing_flows_from_a_later_token():
    weights = [torch.tril(torch.ones(2, 5, 5)) / torch.arange(1, 6)[:, None] for _ in range(3)]
    shown = heads.attention_flow(weights)
    assert shown.triu(1).eq(0).all()
    assert (shown.tril() > 0).equal(torch.ones(5, 5).tril() > 0)


def test_what_is_too_long_is_told_of_the_way_out(monkeypatch):
    monkeypatch.setattr(rollout, "MOST_WORK", 1000)
    with pytest.raises(
        ConfigurationError,
        match=r"from 5 outputs through 2 layers of 5 tokens is 1,250 steps, and the "
        r"most is 1,000: ask for fewer outputs, as outputs=\[4\], or for attention_rollout",
    ):
        heads.attention_flow(layers(2, 5))
    assert heads.attention_flow(layers(2, 5), outputs=[4]).shape == (1, 5)


@pytest.mark.parametrize("function", [heads.attention_rollout, heads.attention_flow])
@pytest.mark.parametrize(
    "given", [[], [torch.eye(3)], [torch.ones(2, 3, 4)], [torch.ones(1, 3, 3), torch.ones(1, 2, 2)]]
)
def test_layers_are_of_self_attention_and_of_one_length(function, given):
    with pytest.raises(ShapeError, match="at least one and all of one N: rollout and flow are of self-attention"):
        function(given)


@pytest.mark.parametrize("residual", [-0.1, 1.5])
def test_a_residual_is_a_share(residual):
    with pytest.raises(ConfigurationError, match="residual is .*; it needs a share from 0 to 1"):
        heads.attention_rollout(layers(1, 2), residual=residual)
    with pytest.raises(ConfigurationError, match="residual is .*; it needs a share from 0 to 1"):
        heads.rollout_from_sources(torch.eye(2), [], residual=residual)


def test_flow_is_of_one_sequence_and_of_tokens_that_are_there():
    with pytest.raises(ShapeError, match="attention_flow is of one sequence"):
        heads.attention_flow([torch.ones(1, 2, 3, 3)])
    with pytest.raises(ShapeError, match=r"outputs are \[3\], and there are 3 tokens"):
        heads.attention_flow(layers(1, 3), outputs=[3])
