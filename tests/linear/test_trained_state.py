"""TTT-Linear: gradients of each token by autograd of the loss itself, in float64."""

from typing import Any

import pytest
import torch
from torch.nn.functional import layer_norm

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import ttt_attention

DIM = 6


def inputs(length=37, heads=3) -> dict[str, Any]:
    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "query": drawn(2, heads, length, DIM),
        "key": drawn(2, heads, length, DIM),
        "value": drawn(2, heads, length, DIM),
        "rate": drawn(2, heads, length).sigmoid() / 4,
        "initial": drawn(heads, DIM, DIM),
        "norm_weight": drawn(heads, DIM),
        "norm_bias": drawn(heads, DIM),
    }


def model(rows, weights, norm_weight, norm_bias):
    """x + LN(Wᵀ x) of the rows (..., heads, DIM) of one token."""
    inner = (rows.unsqueeze(-2) @ weights).squeeze(-2)
    return rows + norm_weight * layer_norm(inner, (DIM,), eps=1e-6) + norm_bias


def by_steps(query, key, value, rate, initial, norm_weight, norm_bias, mini_batch=16):
    weights = before = initial.expand(len(query), *initial.shape)
    rows = []
    for t in range(query.shape[2]):
        before = weights if t % mini_batch == 0 else before
        loss = (model(key[:, :, t], before, norm_weight, norm_bias) - value[:, :, t]).square().sum() / 2
        [gradient] = torch.autograd.grad(loss, before, create_graph=True)
        weights = weights - rate[:, :, t, None, None] * gradient
        rows.append(model(query[:, :, t], weights, norm_weight, norm_bias))
    return torch.stack(rows, 2)


@pytest.mark.parametrize(("length", "mini_batch"), [(1, 16), (37, 16), (37, 1), (37, 5), (16, 64)])
def test_it_takes_each_gradient_step(length, mini_batch):
    given = inputs(length)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    results = ttt_attention(**given, mini_batch=mini_batch), by_steps(**given, mini_batch=mini_batch)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    ours, theirs = (torch.autograd.grad(each, leaves, upstream, materialize_grads=True) for each in results)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_one_head_no_tokens_and_half_precision():
    given = inputs(heads=1)
    alone = {name: each[0, 0] if each.ndim > 2 and len(each) == 2 else each[0] for name, each in given.items()}
    for tensor in given.values():
        tensor.requires_grad_()
    torch.testing.assert_close(ttt_attention(**alone), by_steps(**given)[0, 0])
    low = {name: each.bfloat16() for name, each in inputs(heads=1).items()}
    exact = by_steps(**{name: each.double().requires_grad_() for name, each in low.items()})
    found = ttt_attention(**low)
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert ttt_attention(**inputs(0)).shape == (2, 3, 0, DIM)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rate": -torch.ones(2, 3, 37)}, ConfigurationError, "rate has values from -1 to -1; it needs values of at l"),
        ({"value": torch.ones(2, 3, 37, 5).double()}, ShapeError, "they need one shape, since keys are added"),
        ({"mini_batch": 0}, ConfigurationError, "mini_batch is 0; it needs at least 1"),
        ({"mini_batch": "2"}, ConfigurationError, "mini_batch needs a whole number; it is '2'"),
        ({"epsilon": -1.0}, ConfigurationError, "epsilon is -1.0; it needs a finite number above 0, such as 1e-6"),
        ({"epsilon": None}, ConfigurationError, "epsilon is None; it needs a finite number above 0"),
        ({"initial": None}, DtypeError, "initial needs a torch.Tensor; it is None"),
        ({"initial": torch.eye(6) + 0j}, DtypeError, "initial needs a floating-point tensor; it is torch.complex64"),
        ({"initial": torch.ones(2, 6, 6)}, ShapeError, r"initial has .* it needs \(3, 6, 6\), or \(6, 6\) for all he"),
        ({"norm_bias": torch.ones(7)}, ShapeError, r"norm_bias has the shape \(7,\); it needs \(3, 6\), or \(6,\)"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        ttt_attention(**{**inputs(), **change})
