"""Titans' linear memory: chunks of triangular systems, against a step for each token in float64."""

from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import (
    Identity,
    MomentumState,
    linear_attention,
    titans_attention,
    titans_attention_with_state,
)


def inputs(length=37, heads=4, key_heads=2) -> dict[str, Any]:
    def drawn(*shape):
        return torch.randn(2, *shape, dtype=torch.float64)

    return {
        "query": drawn(heads, length, 7),
        "key": torch.nn.functional.normalize(drawn(key_heads, length, 7), dim=-1),
        "value": drawn(key_heads, length, 5),
        "rate": drawn(key_heads, length).sigmoid(),
        "momentum": drawn(key_heads, length).sigmoid(),
        "decay": -drawn(key_heads, length).exp() / 8,
    }


def by_steps(query, key, value, rate, momentum, decay, mini_batch=1, state=None):
    group = query.shape[1] // key.shape[1]
    memory = key.new_zeros(*key.shape[:2], 7, 5) if state is None else state.memory
    step = torch.zeros_like(memory) if state is None else state.last_step
    rows, before = [], memory
    for t in range(key.shape[2]):
        before = memory if t % mini_batch == 0 else before
        error = key[:, :, t, None] @ before - value[:, :, t, None]
        numbers = (each[:, :, t, None, None] for each in (rate, momentum, decay.exp()))
        theta, eta, fade = numbers
        step = eta * step - theta * key[:, :, t, :, None] * error
        memory = fade * memory + step
        rows.append((query[:, :, t, None] @ memory.repeat_interleave(group, 1)).squeeze(-2))
    return torch.stack(rows, 2), MomentumState(memory, step)


@pytest.mark.parametrize("mini_batch", [1, 3, 16, 100])
@pytest.mark.parametrize("length", [1, 37, 64, 131])
def test_it_takes_each_step(length, mini_batch):
    given = inputs(length)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    first = MomentumState(*torch.randn(2, 2, 2, 7, 5, dtype=torch.float64).requires_grad_().unbind())
    found, state = titans_attention_with_state(**given, mini_batch=mini_batch, state=first)
    expected, after = by_steps(**given, mini_batch=mini_batch, state=first)
    torch.testing.assert_close((found, *state), (expected, *after))
    upstream = [torch.randn_like(each) for each in (found, *state)]
    ours, theirs = (
        torch.autograd.grad(each, [*leaves, *first], upstream) for each in ((found, *state), (expected, *after))
    )
    torch.testing.assert_close(ours, theirs)


def test_without_momentum_and_decay_it_is_the_delta_rule():
    given = inputs(131)
    query, key, value, rate = (given[name] for name in ("query", "key", "value", "rate"))
    found = titans_attention(query, key, value, rate=rate)
    told: dict[str, Any] = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}
    torch.testing.assert_close(found, linear_attention(query, key, value, beta=rate, **told))


def test_whole_momentum_and_what_is_all_forgotten():
    given = inputs(131, key_heads=4)
    given["momentum"][:, :, 5:40] = 1.0
    given["momentum"][:, :, 50], given["decay"][:, :, 60], given["rate"][:, :, 70:75] = 0.0, -torch.inf, 0.0
    given["rate"] /= 8
    torch.testing.assert_close(titans_attention(**given), by_steps(**given)[0])


def test_one_head_no_tokens_and_low_precision():
    given = inputs(131, 1, 1)
    alone = {name: each[0, 0] for name, each in given.items()}
    torch.testing.assert_close(titans_attention(**alone), by_steps(**given)[0][0, 0])
    for dtype, roundings in ((torch.float32, 64), (torch.bfloat16, 1)):
        low = {name: each.to(dtype) for name, each in inputs(131).items()}
        exact, _ = by_steps(**{name: each.double() for name, each in low.items()})
        found = titans_attention(**low)
        assert found.dtype is dtype
        assert (found - exact).abs().max() < roundings * torch.finfo(dtype).eps * exact.abs().max()
    rows, state = titans_attention_with_state(**inputs(0))
    assert rows.shape == (2, 4, 0, 5)
    assert not torch.stack(state).any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rate": -torch.ones(2, 2, 37)}, ConfigurationError, "rate has values from -1 to -1; it needs values of at l"),
        (
            {"momentum": torch.full((2, 2, 37), 1.5)},
            ConfigurationError,
            r"momentum has values .* it needs values in 0\.\.1: pass it after its sigmoid",
        ),
        ({"decay": torch.ones(2, 2, 37)}, ConfigurationError, "decay has values up to 1"),
        ({"rate": torch.ones(2, 3, 37)}, ShapeError, r"rate has the shape \(2, 3, 37\); .* it needs \(2, 2, 37\)"),
        ({"rate": None}, DtypeError, "rate needs a torch.Tensor; it is None"),
        ({"mini_batch": 0}, ConfigurationError, "mini_batch is 0; it needs at least 1"),
        ({"mini_batch": 1.5}, ConfigurationError, "mini_batch needs a whole number; it is 1.5"),
        (
            {"state": torch.ones(2, 2, 2, 7, 5)},
            DtypeError,
            "state needs a MomentumState, of memory and last_step; it is",
        ),
        ({"state": (torch.ones(2, 2, 7, 5), None)}, DtypeError, "state.last_step needs a torch.Tensor; it is None"),
        ({"query": torch.ones(2, 4, 36, 7).double()}, ShapeError, "query has 36 positions and key 37"),
        (
            {"state": MomentumState(torch.ones(2, 2, 7, 5), torch.ones(2, 7, 5))},
            ShapeError,
            r"state\.last_step has the shape \(2, 7, 5\); it needs \(2, 2, 7, 5\)",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        titans_attention(**{**inputs(), **change})
