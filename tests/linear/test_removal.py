"""The generalised delta rule, whose removed key is not the written one: published rules, options and bad arguments."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import regard
from regard import masks
from regard.linear import Elu, Identity, linear_attention_weights, naive

RAW: dict[str, Any] = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}


def inputs(length=67, heads=4, key_heads=2, dims=(5, 3), dtype=torch.float64):
    query, key, removal = (
        functional.normalize(torch.randn(2, count, length, dims[0], dtype=dtype), dim=-1)
        for count in (heads, key_heads, key_heads)
    )
    return query, key, torch.randn(2, key_heads, length, dims[1], dtype=dtype), removal


def decay_of(key: Tensor, axes: int) -> Tensor | None:
    return -torch.rand(key.shape[:axes], dtype=key.dtype) if axes else None


@pytest.mark.parametrize("axes", [0, 3, 4])
def test_gated_delta_net_2(axes):
    """S_t = (I - k (b ⊙ k)ᵀ) e^g S_{t-1} + k (w ⊙ v)ᵀ, with erase gate b and write gate w."""
    query, key, value, _ = inputs()
    decay, erase, write = decay_of(key, axes), torch.rand_like(key), torch.rand_like(value)
    state, rows = torch.zeros(2, 2, 5, 3, dtype=torch.float64), []
    factors = torch.ones_like(key) if decay is None else (decay if axes == 4 else decay[..., None]).exp()
    for t in range(67):
        k, b, w = key[:, :, t], erase[:, :, t], write[:, :, t]
        projection = torch.eye(5, dtype=torch.float64) - k[..., :, None] * (b * k)[..., None, :]
        state = projection @ (factors[:, :, t, :, None] * state) + k[..., :, None] * (w * value[:, :, t])[..., None, :]
        rows.append(query[:, :, t, None, :] @ state.repeat_interleave(2, 1))
    ours, final = regard.linear_attention_with_state(query, key, write * value, decay=decay, removal=erase * key, **RAW)
    torch.testing.assert_close(ours, torch.cat(rows, 2))
    torch.testing.assert_close(final.matrix, state)


@pytest.mark.parametrize("axes", [0, 3, 4])
def test_a_beta_for_each_feature_is_a_factor_of_the_written_key(axes):
    query, key, value, removal = inputs()
    decay, beta = decay_of(key, axes), torch.rand_like(key)
    for removed in (None, removal):
        ours, final = regard.linear_attention_with_state(
            query, key, value, decay=decay, beta=beta, removal=removed, **RAW
        )
        read = key if removed is None else removed
        ones = torch.ones_like(beta[..., 0])
        theirs, state = naive.step_recurrence(query, beta * key, value, decay=decay, beta=ones, removal=read)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(final.matrix, state)


def test_the_written_key_removed_is_the_delta_rule():
    query, key, value, _ = inputs()
    options: dict[str, Any] = RAW | {"beta": torch.rand(2, 2, 67, dtype=torch.float64), "decay": decay_of(key, 4)}
    ours = regard.linear_attention(query, key, value, removal=key, **options)
    torch.testing.assert_close(ours, regard.linear_attention(query, key, value, **options))


def test_removal_is_of_features():
    query, key, value, _ = inputs()
    removal = torch.rand_like(key) / 5
    ours = regard.linear_attention(query, key, value, feature_map=Elu(), normalize=False, causal=True, removal=removal)
    ones = torch.ones_like(key[..., 0])
    theirs = naive.step_recurrence(Elu()(query), Elu()(key), value, beta=ones, removal=removal)[0]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("axes", "strength"), [(0, 1.0), (3, 1.0), (4, 1.0), (3, 60.0), (4, 60.0)])
@pytest.mark.parametrize("length", [1, 2, 67, 131])
def test_float32_within_the_error_of_steps(monkeypatch, axes, strength, length, native):
    if not native:  # chunks of torch's operators
        monkeypatch.setattr(sys.modules["regard.linear.recurrence"], "_maker", lambda problem: None)
    given, decay = inputs(length), decay_of(inputs(length)[1], axes)
    decay = None if decay is None else strength * decay
    gates = {"decay": decay, "beta": torch.rand(2, 2, length, dtype=torch.float64)}
    seed = torch.randn(2, 4, length, 3, dtype=torch.float64)

    def by(compute, dtype):
        query, key, value, removal = (tensor.detach().to(dtype).requires_grad_() for tensor in given)
        cast = {name: None if gate is None else gate.to(dtype) for name, gate in gates.items()}
        output = compute(query, key, value, removal=removal, **cast)
        return [output, *torch.autograd.grad(output, [query, key, value, removal], seed.to(dtype))]

    def steps(*tensors, **options):
        return naive.step_recurrence(*tensors, **options)[0]

    def ours(*tensors, **options):
        return regard.linear_attention(*tensors, **options, **RAW)

    exact, single, found = by(steps, torch.float64), by(steps, torch.float32), by(ours, torch.float32)
    for truth, lost, result in zip(exact, single, found, strict=True):
        error = (result.double() - truth).abs().max()
        budget = (lost.double() - truth).abs().max() + 4 * torch.finfo(torch.float32).eps * truth.abs().max()
        assert error <= 4 * budget


def test_strong_decays_are_exact():
    query, key, value, removal = inputs(131)
    decay = -60 * torch.rand_like(key)
    ours = regard.linear_attention(query, key, value, decay=decay, removal=removal, **RAW)
    ones = torch.ones_like(key[..., 0])
    theirs = naive.step_recurrence(query, key, value, decay=decay, beta=ones, removal=removal)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_state_continues():
    query, key, value, removal = inputs()
    beta = torch.rand(2, 2, 67, dtype=torch.float64)
    whole, final = regard.linear_attention_with_state(query, key, value, removal=removal, beta=beta, **RAW)
    state, parts = None, []
    for part in (slice(0, 40), slice(40, 41), slice(41, 67)):
        tensors = [tensor[:, :, part] for tensor in (query, key, value)]
        gates = {"removal": removal[:, :, part], "beta": beta[:, :, part]}
        output, state = regard.linear_attention_with_state(*tensors, state=state, **gates, **RAW)
        parts.append(output)
    assert state is not None
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state.matrix, final.matrix)


def test_documents_and_padding():
    query, key, value, removal = inputs(11)
    ids, keep = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]), torch.rand(2, 1, 1, 11) > 0.3
    beta, decay = torch.rand_like(key), decay_of(key, 4)
    assert decay is not None
    gates = {"beta": beta, "decay": decay, "removal": removal}
    mask = masks.documents(ids) & masks.where(keep=keep)
    ours = regard.linear_attention(query, key, value, mask=mask, **gates, **RAW)
    for row in range(2):
        for document in ids.unique():
            chosen = (ids == document) & keep[row, 0, 0]
            if chosen.any():
                tensors = [tensor[row : row + 1, :, chosen] for tensor in (query, key, value)]
                own = {name: gate[row : row + 1, :, chosen] for name, gate in gates.items()}
                alone = regard.linear_attention(*tensors, **own, **RAW)
                torch.testing.assert_close(ours[row : row + 1, :, chosen], alone)


@pytest.mark.parametrize(
    ("name", "bad"),
    [*((name, torch.nan) for name in ("key", "value", "beta", "removal")), ("key", torch.inf), ("removal", -torch.inf)],
)
def test_nan_and_infinity_reach_later_rows_alone_and_none_where_masked(name, bad):
    query, key, value, removal = inputs(20)
    given = {"key": key, "value": value, "beta": torch.rand_like(key), "removal": removal}
    clean = regard.linear_attention(query, **given, **RAW)
    given[name] = given[name].clone()
    given[name][0, 0, 7, 1] = bad
    found = regard.linear_attention(query, **given, **RAW)
    torch.testing.assert_close(found[:, :, :7], clean[:, :, :7])
    torch.testing.assert_close(found[:, 2:], clean[:, 2:])
    torch.testing.assert_close(found[1], clean[1])
    assert found[0, :2, 7:].isnan().all()
    masked = torch.ones(20, dtype=torch.bool)
    masked[7] = False
    found = regard.linear_attention(query, **given, mask=masked, **RAW)
    others = {other: tensor[:, :, masked] for other, tensor in given.items()}
    alone = regard.linear_attention(query[:, :, masked], **others, **RAW)
    torch.testing.assert_close(found[:, :, masked], alone)


def test_signed_weights_of_rows():
    query, key, value, removal = inputs(23)
    options: dict[str, Any] = RAW | {"removal": removal, "beta": torch.rand_like(key), "decay": decay_of(key, 4)}
    weights = linear_attention_weights(query, key, slice(5, 20), **options)
    output = weights @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(output, regard.linear_attention(query, key, value, **options)[:, :, 5:20])


def test_without_heads_and_with_one_number_for_all_features():
    query, key, value, removal = (tensor[0, 0] for tensor in inputs(9, heads=2))
    ours = regard.linear_attention(query, key, value, removal=removal[:, :1], **RAW)
    theirs = regard.linear_attention(query, key, value, removal=removal[:, :1].expand_as(key), **RAW)
    torch.testing.assert_close(ours, theirs)
