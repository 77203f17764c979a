"""DeltaFormer: values that are corrected by what was read before, against the formula step by step in float64."""

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.linear import delta_former


def inputs(length=37, heads=4, key_heads=2):
    def drawn(*shape):
        return torch.randn(2, *shape, dtype=torch.float64)

    rows = drawn(heads, length, 7), drawn(key_heads, length, 7), drawn(key_heads, length, 5)
    return *rows, 2 * drawn(heads, length).sigmoid(), drawn(heads, length, 7)


def by_steps(query, key, value, beta, removal):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    corrected, rows = value[:, :, :0], []
    for t in range(query.shape[2]):
        lacks = value[:, :, t, None]
        if t:
            weights = (removal[:, :, t, None] @ key[:, :, :t].mT / 7**0.5).softmax(-1)
            lacks = lacks - beta[:, :, t, None, None] * (weights @ corrected)
        corrected = torch.cat([corrected, lacks], 2)
        rows.append((query[:, :, t, None] @ key[:, :, : t + 1].mT / 7**0.5).softmax(-1) @ corrected)
    return torch.cat(rows, 2)


@pytest.mark.parametrize("length", [1, 2, 37, 64, 65, 197])
def test_it_is_the_delta_rule_with_softmax(length):
    tensors = [tensor.requires_grad_() for tensor in inputs(length)]
    query, key, value, beta, removal = tensors
    results = delta_former(query, key, value, beta=beta, removal=removal), by_steps(*tensors)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    found, expected = (
        torch.autograd.grad(each, tensors, upstream, allow_unused=True, materialize_grads=True) for each in results
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_large_scores_in_float32_and_defaults():
    query, key, value, beta, _ = (tensor.float() for tensor in inputs(131))
    query = 30 * query
    found = delta_former(query, key, value)
    exact = by_steps(*(each.double() for each in (query, key, value, torch.ones_like(beta), query)))
    assert (found - exact).abs().max() < 1024 * torch.finfo(torch.float32).eps * exact.abs().max()  # of scores to 100


def test_one_head_and_no_tokens():
    query, key, value, beta, removal = inputs(heads=2)
    alone = delta_former(*(each[1, 1] for each in (query, key, value)), beta=beta[1, 1], removal=removal[1, 1])
    torch.testing.assert_close(alone, by_steps(query, key, value, beta, removal)[1, 1])
    query, key, value, *_ = inputs(0)
    assert delta_former(query, key, value).shape == (2, 4, 0, 5)


def test_bad_arguments_are_named():
    query, key, value, beta, removal = inputs()
    with pytest.raises(ConfigurationError, match=r"beta has values from .* it needs values in 0\.\.2"):
        delta_former(query, key, value, beta=4 * beta)
    with pytest.raises(ShapeError, match=r"beta has the shape \(2, 4, 9\); .* needs \(2, 4, 37\)"):
        delta_former(query, key, value, beta=beta[..., :9])
    with pytest.raises(ShapeError, match="needs as many queries as keys, and a removal of the query's shape"):
        delta_former(query, key, value, removal=removal[:, :2])
