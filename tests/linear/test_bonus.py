"""RWKV-6's bonus: a factor of each token's own term, whose query reads the state before it."""

from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.linear import Elu, Identity, LinearState, linear_attention_weights

RAW: dict[str, Any] = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}


def inputs(length=67, heads=4, key_heads=2, dims=(5, 3)):
    shapes = (heads, length, dims[0]), (key_heads, length, dims[0]), (key_heads, length, dims[1])
    return tuple(torch.randn(2, *shape, dtype=torch.float64) for shape in shapes)


def by_steps(query, key, value, bonus, decay=None, state=None):
    """o_t = qᵀ (S_{t-1} + diag(u) k vᵀ), S_t = e^g S_{t-1} + k vᵀ."""
    group = query.shape[1] // key.shape[1]
    state = torch.zeros(*key.shape[:2], key.shape[-1], value.shape[-1], dtype=key.dtype) if state is None else state
    bonus, rows = bonus.expand_as(key), []
    for t in range(key.shape[2]):
        added = key[:, :, t, :, None] * value[:, :, t, None, :]
        read = state + bonus[:, :, t, :, None] * added
        rows.append(query[:, :, t, None, :] @ read.repeat_interleave(group, 1))
        if decay is not None:
            factor = decay[:, :, t].exp()
            state = state * (factor[..., None, None] if decay.ndim == 3 else factor[..., None])
        state = state + added
    return torch.cat(rows, 2), state


@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 67, 131])
@pytest.mark.parametrize("initial", [False, True])
def test_rwkv_6(axes, length, initial):
    query, key, value = inputs(length)
    decay = -torch.rand((2, 2, length, 5)[:axes], dtype=torch.float64) if axes else None
    bonus = torch.randn(1, 2, 1, 5, dtype=torch.float64)
    start = torch.randn(2, 2, 5, 3, dtype=torch.float64) if initial else None
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bonus, decay, start) if tensor is not None]
    state = None if start is None else LinearState(start)
    ours = regard.linear_attention_with_state(query, key, value, decay=decay, bonus=bonus, state=state, **RAW)
    results, expected = (ours[0], ours[1].matrix), by_steps(query, key, value, bonus, decay, start)
    seeds = [torch.randn_like(result) for result in expected]
    found = [*results, *torch.autograd.grad(results, leaves, seeds, allow_unused=True, materialize_grads=True)]
    exact = [*expected, *torch.autograd.grad(expected, leaves, seeds, allow_unused=True, materialize_grads=True)]
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_normalised_weights_count_the_own_term():
    query, key, value = inputs(23)
    bonus = torch.rand(2, 2, 23, 5, dtype=torch.float64)
    ones = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    rows = by_steps(Elu()(query), Elu()(key), ones, bonus)[0]
    ours = regard.linear_attention(query, key, value, causal=True, bonus=bonus)
    torch.testing.assert_close(ours, rows[..., :-1] / rows[..., -1:])


def test_documents_and_padding():
    query, key, value = inputs(11)
    ids, keep = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]), torch.rand(2, 1, 1, 11) > 0.3
    bonus = torch.rand(1, 2, 1, 5, dtype=torch.float64)
    ours = regard.linear_attention(
        query, key, value, mask=masks.documents(ids) & masks.where(keep=keep), bonus=bonus, **RAW
    )
    for row in range(2):
        for document in ids.unique():
            chosen = (ids == document) & keep[row, 0, 0]
            if chosen.any():
                tensors = [tensor[row : row + 1, :, chosen] for tensor in (query, key, value)]
                alone = regard.linear_attention(*tensors, bonus=bonus, **RAW)
                torch.testing.assert_close(ours[row : row + 1, :, chosen], alone)


def test_signed_weights():
    query, key, value = inputs(23)
    options: dict[str, Any] = RAW | {"bonus": torch.randn(1, 2, 1, 5, dtype=torch.float64)}
    weights = linear_attention_weights(query, key, slice(5, 20), **options)
    rows = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(rows, regard.linear_attention(query, key, value, **options)[:, :, 5:20])


def test_nan_reaches_its_own_row_and_later_ones():
    query, key, value = inputs(20)
    bonus = torch.rand(2, 2, 20, 5, dtype=torch.float64)
    clean = regard.linear_attention(query, key, value, bonus=bonus, **RAW)
    bonus[0, 0, 7, 1] = torch.nan
    found = regard.linear_attention(query, key, value, bonus=bonus, **RAW)
    torch.testing.assert_close(found[:, :, :7], clean[:, :, :7])
    torch.testing.assert_close(found[1], clean[1])
    assert found[0, :2, 7:].isnan().all()


def test_bad_arguments():
    query, key, value = inputs(7)
    bonus = torch.rand(1, 2, 1, 5, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="bonus needs an order of the keys"):
        regard.linear_attention(query, key, value, bonus=bonus)
    with pytest.raises(ConfigurationError, match="bonus is of sums, .* and beta of the delta rule: pass one"):
        regard.linear_attention(query, key, value, bonus=bonus, beta=torch.rand(2, 2, 7), **RAW)
    with pytest.raises(
        ShapeError, match=r"bonus has the shape \(2, 5\); it needs \(2, 2, 7, 5\), \(\*batch, key heads"
    ):
        regard.linear_attention(query, key, value, bonus=torch.rand(2, 5), **RAW)
    with pytest.raises(ShapeError, match="bonus is for 4 features, but keys have 5"):
        regard.linear_attention(query, key, value, bonus=torch.rand(2, 2, 7, 4), **RAW)
    with pytest.raises(ConfigurationError, match="a bonus gives a token's own another factor"):
        regard.observe_linear_attention(query, key, value, regard.lenses.Entropy(), causal=True, bonus=bonus)
