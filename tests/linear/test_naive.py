"""The two definitions, weights of all pairs and one step at a time, agree; and both with a loop over single numbers."""

import math

import pytest
import torch

from regard.linear import naive


def inputs(length=7, dim=3, value_dim=2, heads=4, key_heads=2, batch=2):
    query = torch.rand(batch, heads, length, dim, dtype=torch.float64)
    key = torch.rand(batch, key_heads, length, dim, dtype=torch.float64)
    return query, key, torch.randn(batch, key_heads, length, value_dim, dtype=torch.float64)


@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 7])
def test_the_two_forms_agree(axes, length):
    query, key, value = inputs(length)
    decay = -torch.rand(key.shape[:axes], dtype=torch.float64) if axes else None
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    all_at_once = naive.quadratic(query, key, value, keep=causal, decay=decay)
    by_steps, _ = naive.step_recurrence(query, key, value, decay=decay)
    torch.testing.assert_close(by_steps, all_at_once)


def test_weights_are_the_formula():
    query, key, _ = inputs(length=5, heads=2, key_heads=1, batch=1)
    decay = -torch.rand(1, 1, 5, 3, dtype=torch.float64)
    weights = naive.quadratic_weights(query, key, decay=decay)
    for head in range(2):
        for i in range(5):
            for j in range(5):
                expected = sum(
                    float(query[0, head, i, d] * key[0, 0, j, d]) * math.exp(float(decay[0, 0, j + 1 : i + 1, d].sum()))
                    for d in range(3)
                )
                assert weights[0, head, i, j].item() == pytest.approx(expected if j <= i else 0.0)


def test_normalized_weights_add_up_to_one_and_rows_without_keys_to_zero():
    query, key, value = inputs()
    keep = torch.ones(7, 7, dtype=torch.bool).tril(-1)
    weights = naive.quadratic_weights(query, key, keep=keep, normalize=True)
    torch.testing.assert_close(weights.sum(-1)[..., 1:], torch.ones(2, 4, 6, dtype=torch.float64))
    assert not weights[..., 0, :].any()
    assert not naive.quadratic(query, key, value, keep=keep, normalize=True)[..., 0, :].any()


def test_the_delta_rule_stores_values_under_orthonormal_keys():
    key = torch.eye(3, dtype=torch.float64)[None, None]
    value = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    beta = torch.ones(1, 1, 3, dtype=torch.float64)
    _, state = naive.step_recurrence(key, key, value, beta=beta)
    torch.testing.assert_close(state[0, 0], value[0, 0])
    other = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    _, state = naive.step_recurrence(key, key, other, beta=beta, state=state)  # what was stored is replaced
    torch.testing.assert_close(state[0, 0], other[0, 0])


def test_steps_continue_from_a_state():
    query, key, value = inputs()
    decay = -torch.rand(2, 2, 7, dtype=torch.float64)
    whole, final = naive.step_recurrence(query, key, value, decay=decay)
    _, state = naive.step_recurrence(query[:, :, :4], key[:, :, :4], value[:, :, :4], decay=decay[:, :, :4])
    rest, last = naive.step_recurrence(
        query[:, :, 4:], key[:, :, 4:], value[:, :, 4:], decay=decay[:, :, 4:], state=state
    )
    torch.testing.assert_close(rest, whole[:, :, 4:])
    torch.testing.assert_close(last, final)
