"""Several steps of the delta rule for each token, against the formulas of DeltaProduct and RWKV-7 in float64."""

import pytest
import torch
from torch.nn import functional

from regard import masks
from regard.errors import ShapeError
from regard.linear import Elu, delta_product, delta_product_with_state


def inputs(length=29, steps=3, heads=4, key_heads=2, dims=(5, 3)):
    query = torch.randn(2, heads, length, dims[0], dtype=torch.float64)
    key = functional.normalize(torch.randn(2, key_heads, length, steps, dims[0], dtype=torch.float64), dim=-1)
    value = torch.randn(2, key_heads, length, steps, dims[1], dtype=torch.float64)
    return query, key, value, 2 * torch.rand_like(key[..., 0])


def by_matrices(query, key, value, beta, decay=None, removal=None):
    """S_t = Π (I - β k rᵀ) e^g S_{t-1} and what the steps add, with all matrices written out; the rows and S."""
    removal = key if removal is None else removal
    group = query.shape[1] // key.shape[1]
    state, rows = torch.zeros(*key.shape[:2], key.shape[-1], value.shape[-1], dtype=key.dtype), []
    identity = torch.eye(key.shape[-1], dtype=key.dtype)
    for t in range(key.shape[2]):
        if decay is not None:
            factor = decay[:, :, t].exp()
            state = state * (factor[..., None, None] if decay.ndim == 3 else factor[..., None])
        for i in range(key.shape[3]):
            written = beta[:, :, t, i, None, None] * key[:, :, t, i, :, None]
            state = (identity - written @ removal[:, :, t, i, None, :]) @ state
            state = state + written @ value[:, :, t, i, None, :]
        rows.append(query[:, :, t, None, :] @ state.repeat_interleave(group, 1))
    return torch.cat(rows, 2), state


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("removes", [False, True])
def test_it_is_the_product_of_matrices(steps, axes, removes):
    query, key, value, beta = inputs(steps=steps)
    decay = -torch.rand((2, 2, 29, 5)[:axes], dtype=torch.float64) if axes else None
    removal = torch.randn_like(key) / 5 if removes else None
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, beta, decay, removal) if tensor is not None]
    ours = delta_product_with_state(query, key, value, beta=beta, decay=decay, removal=removal, scale=1.0)
    results = ours[0], ours[1].matrix
    expected = by_matrices(query, key, value, beta, decay, removal)
    seeds = [torch.randn_like(result) for result in expected]
    found = [*results, *torch.autograd.grad(results, leaves, seeds)]
    for one, other in zip(found, [*expected, *torch.autograd.grad(expected, leaves, seeds)], strict=True):
        torch.testing.assert_close(one, other)


def test_rwkv_7():
    """S_t = (diag(w) - (κ ⊙ a) κᵀ) S_{t-1} + k vᵀ: what is removed is read before the decay, by another key."""
    query, _, _, _ = inputs(heads=2)
    key, value = torch.randn(2, 2, 29, 5, dtype=torch.float64), torch.randn(2, 2, 29, 3, dtype=torch.float64)
    removed = functional.normalize(torch.randn_like(key), dim=-1)
    rate, decay = torch.rand_like(key), -0.6 * torch.rand_like(key)
    state, rows = torch.zeros(2, 2, 5, 3, dtype=torch.float64), []
    for t in range(29):
        transition = torch.diag_embed(decay[:, :, t].exp())
        transition = transition - (removed * rate)[:, :, t, :, None] * removed[:, :, t, None, :]
        state = transition @ state + key[:, :, t, :, None] * value[:, :, t, None, :]
        rows.append(query[:, :, t, None, :] @ state)
    ours, final = delta_product_with_state(
        query,
        torch.stack([removed * rate, key], -2),
        torch.stack([torch.zeros_like(value), value], -2),
        removal=torch.stack([removed * (-decay).exp(), torch.zeros_like(key)], -2),
        decay=decay,
        scale=1.0,
    )
    torch.testing.assert_close(ours, torch.cat(rows, 2))
    torch.testing.assert_close(final.matrix, state)


def test_a_state_continues_and_a_token_at_a_time():
    query, key, value, beta = inputs()
    decay = -torch.rand(2, 2, 29, 5, dtype=torch.float64)
    whole, final = delta_product_with_state(query, key, value, beta=beta, decay=decay)
    state, parts = None, []
    for part in (slice(0, 20), *(slice(t, t + 1) for t in range(20, 29))):
        own = [tensor[:, :, part] for tensor in (query, key, value, beta, decay)]
        output, state = delta_product_with_state(*own[:3], beta=own[3], decay=own[4], state=state)
        parts.append(output)
    assert state is not None
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state.matrix, final.matrix)


def test_documents_and_masked_tokens():
    query, key, value, beta = inputs(length=11)
    ids, keep = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]), torch.rand(2, 1, 1, 11) > 0.3
    decay = -torch.rand(2, 2, 11, dtype=torch.float64)
    mask = masks.documents(ids) & masks.where(keep=keep)
    ours = delta_product(query, key, value, mask=mask, beta=beta, decay=decay)
    for row in range(2):
        for document in ids.unique():
            chosen = (ids == document) & keep[row, 0, 0]
            if chosen.any():
                one = slice(row, row + 1)
                own = [tensor[one, :, chosen] for tensor in (query, key, value, beta, decay)]
                alone = delta_product(*own[:3], beta=own[3], decay=own[4])
                torch.testing.assert_close(ours[one, :, chosen], alone)


def test_features_and_no_heads():
    query, key, value, beta = (tensor[0, 0] for tensor in inputs(heads=2))
    ours = delta_product(query, key / 5, value, beta=beta / 5, feature_map=Elu())
    theirs = by_matrices(Elu()(query)[None, None], Elu()(key / 5)[None, None], value[None, None], beta[None, None] / 5)
    torch.testing.assert_close(ours, theirs[0][0, 0])


def test_no_tokens():
    query, key, value, beta = inputs(length=0)
    assert delta_product(query, key, value, beta=beta).shape == (2, 4, 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[..., :2, :]), r"they need \(..., key heads, N, steps, D\)"),
        (lambda q, k, v: (q, k[:, :, :, 0], v[:, :, :, 0]), r"query has the shape .* needs \(..., heads, 2, 5\)"),
        (lambda q, k, v: (q, k[..., :0, :], v[..., :0, :]), "with one step at least"),
        (lambda q, k, v: (q[:, :, :5], k, v), "it reads the state once for each token"),
    ],
)
def test_bad_shapes(change, message):
    query, key, value, _ = inputs()
    with pytest.raises(ShapeError, match=message):
        delta_product(*change(query, key, value))
