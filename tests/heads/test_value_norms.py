"""Norm-weighted and gradient-weighted attention, against the output of the layer and autograd."""

import pytest
import torch

import regard
from regard import heads, lenses, masks
from regard.errors import ShapeError
from regard.nn import Attention, Projections


def layer_and_parts():
    layer = Attention(Projections(12, num_heads=4, num_kv_heads=2, bias=False))
    x, whole = torch.randn(2, 5, 12), lenses.Weights()
    with torch.no_grad():
        seen = layer.observe(x, whole)
        value = layer.projections.keys_and_values(x)[1]
    return seen.output, seen[whole], value, layer.projections.output.weight.detach()


def test_transformed_values_add_up_to_the_output():
    output, weights, value, projection = layer_and_parts()
    transformed = heads.transformed_values(value, projection)
    assert transformed.shape == (2, 4, 5, 12)
    torch.testing.assert_close((weights @ transformed).sum(1), output)


def test_norms_are_those_of_the_transformed_values():
    _, weights, value, projection = layer_and_parts()
    norms = heads.transformed_values(value, projection).norm(dim=-1)
    torch.testing.assert_close(heads.transformed_norms(value, projection), norms)
    carried = weights.unsqueeze(-1) * heads.transformed_values(value, projection).unsqueeze(-3)
    torch.testing.assert_close(heads.norm_weighted(weights, value, projection), carried.norm(dim=-1))


def test_norms_as_a_bias_show_the_weighted_weights_through_any_lens():
    query, value, projection = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 3), torch.randn(8, 6)
    whole, causal = lenses.Weights(), masks.causal()
    plain = regard.observe(query, query, value, whole, mask=causal)[whole]
    bias = heads.transformed_norms(value, projection).log()[..., None, :]
    shown = regard.observe(query, query, value, whole, mask=causal, bias=bias)[whole]
    weighted = heads.norm_weighted(plain, value, projection)
    torch.testing.assert_close(shown, weighted / weighted.sum(-1, keepdim=True))


@pytest.mark.parametrize("rank", [4, 2])
def test_effective_attention_gives_the_same_output_with_the_least_weights(rank):
    weights, value = torch.randn(2, 3, 5, 9).softmax(-1), torch.randn(2, 3, 9, rank) @ torch.randn(2, 3, rank, 4)
    inverse = torch.linalg.pinv(value.double(), rtol=1e-5).float()
    torch.testing.assert_close(
        heads.effective_attention(weights, value), weights @ value @ inverse, rtol=1e-3, atol=1e-4
    )
    effective = heads.effective_attention(weights, value)
    torch.testing.assert_close(effective @ value, weights @ value, rtol=1e-4, atol=1e-5)
    rest = weights - effective
    torch.testing.assert_close(rest @ value, torch.zeros(2, 3, 5, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close((rest * effective).sum(-1), torch.zeros(2, 3, 5), rtol=0, atol=1e-5)
    assert (effective.norm(dim=-1) < weights.norm(dim=-1)).all()


def test_effective_attention_is_all_of_it_where_no_value_repeats():
    weights, value = torch.randn(2, 4, 4).softmax(-1), torch.randn(2, 4, 6)
    torch.testing.assert_close(heads.effective_attention(weights, value), weights, rtol=1e-4, atol=1e-5)


def test_values_and_projections_fit():
    value, projection = torch.randn(2, 3, 4), torch.randn(12, 8)
    with pytest.raises(ShapeError, match=r"needs 2 heads of 4, or a multiple of them; a Conv1D"):
        heads.transformed_values(value, torch.randn(8, 12))
    with pytest.raises(ShapeError, match=r"they need \(..., heads, N, Dv\) and \(dim, heads · Dv\)"):
        heads.transformed_norms(value[0], projection)
    with pytest.raises(ShapeError, match=r"for 2 heads and 3 values; they need \(..., 2, queries, 3\)"):
        heads.norm_weighted(torch.ones(3, 5, 3), value, projection)
    with pytest.raises(ShapeError, match="each key needs one vector"):
        heads.effective_attention(torch.ones(2, 5), torch.ones(4, 3))


def test_the_gradient_of_a_weight_is_what_autograd_says():
    query, key, value = torch.randn(2, 4, 5, 3), torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 7)
    weights = (query @ key.repeat_interleave(2, 1).mT).softmax(-1).requires_grad_()
    value.requires_grad_()
    output = weights @ value.repeat_interleave(2, 1)
    of_output, of_weights, of_value = torch.autograd.grad(output.tanh().sum(), (output, weights, value))
    torch.testing.assert_close(heads.weight_gradients(value.detach(), of_output), of_weights)
    shown = heads.gradient_times_weights(weights, value.detach(), of_output)
    torch.testing.assert_close(shown, (weights * of_weights).detach())
    torch.testing.assert_close(shown.sum(-1), (output * of_output).sum(-1).detach())
    columns = (value * of_value).sum(-1).detach()
    torch.testing.assert_close(shown.sum(-2).unflatten(1, (2, 2)).sum(2), columns)


def test_gradients_fit_their_values():
    with pytest.raises(ShapeError, match="with key heads that divide the heads"):
        heads.weight_gradients(torch.ones(2, 3, 4), torch.ones(3, 5, 4))
    with pytest.raises(ShapeError, match="with key heads that divide the heads"):
        heads.weight_gradients(torch.ones(2, 3, 4), torch.ones(2, 5, 3))
    with pytest.raises(ShapeError, match=r"are those of weights \(2, 5, 3\)"):
        heads.gradient_times_weights(torch.ones(2, 5, 4), torch.ones(2, 3, 4), torch.ones(2, 5, 4))
