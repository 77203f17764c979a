"""The recurrence in chunks against single steps: lengths around chunks, groups, decays, the delta rule, states."""

import itertools

import pytest
import torch

from regard.linear import naive
from regard.linear.recurrence import recurrence

LENGTHS = (0, 1, 2, 3, 61, 64, 67, 131)


def arguments(length, heads=(4, 2), dims=(5, 3), axes=0, delta=False, initial=False, dtype=torch.float64, strength=1.0):
    """query, key, value, decay, beta and state for a recurrence."""
    (heads, key_heads), (dim, value_dim), batch = heads, dims, 2
    query, key, value = (
        torch.randn(batch, count, length, size, dtype=dtype)
        for count, size in ((heads, dim), (key_heads, dim), (key_heads, value_dim))
    )
    key = key / (key.norm(dim=-1, keepdim=True) + 1e-9)
    decay = -strength * torch.rand(key.shape[:axes], dtype=dtype) if axes else None
    beta = torch.rand(batch, key_heads, length, dtype=dtype) * 2 if delta else None
    state = torch.randn(batch, key_heads, dim, value_dim, dtype=dtype) if initial else None
    return query, key, value, decay, beta, state


def by_steps(query, key, value, decay, beta, state):
    return naive.step_recurrence(query, key, value, decay=decay, beta=beta, state=state)


@pytest.mark.parametrize(("axes", "delta", "initial"), [*itertools.product((0, 3, 4), (False, True), (False, True))])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_steps(length, axes, delta, initial):
    given = arguments(length, axes=axes, delta=delta, initial=initial)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (5, 5)])
@pytest.mark.parametrize("dims", [(1, 1), (2, 7), (8, 8)])
def test_heads_and_dims(heads, dims):
    given = arguments(71, heads, dims, axes=4, delta=True, initial=True)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("strength", [50.0, 5000.0])
def test_strong_decays_overflow_nothing(axes, delta, strength):
    given = arguments(131, axes=axes, delta=delta, initial=True, strength=strength)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [3, 4])
def test_a_decay_of_minus_infinity_forgets(axes):
    query, key, value, decay, _, state = arguments(131, axes=axes, initial=True)
    decay[:, :, 70] = -torch.inf
    output, final = recurrence(query, key, value, decay, None, state)
    tail = [tensor[:, :, 70:] for tensor in (query, key, value, decay)]
    expected = recurrence(*tail)
    torch.testing.assert_close(output[:, :, 70:], expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(final, expected[1], rtol=1e-10, atol=1e-10)
