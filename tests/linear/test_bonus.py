"""RWKV-6's bonus: a factor of each token's own term, whose query reads the state before it."""

from typing import Any

import pytest
import torch

import regard
from regard import masks, native
from regard.backends.cpu.recurrence_pass import RecurrencePassInC
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


BONUSES = {
    "a number": (1, 1, 1, 1),
    "a number for each head": (1, 4, 1, 1),
    "one for each feature": (1, 4, 1, 13),
    "one for each token": (2, 1, 67, 1),
    "one for all of them": (2, 4, 67, 13),
}


@pytest.fixture
def passes(monkeypatch):
    """The bonuses of the passes in C that the test runs, None without one."""
    if native.why_not() is not None:
        pytest.skip("native code is off")
    given, forward = [], RecurrencePassInC.forward
    monkeypatch.setattr(
        RecurrencePassInC,
        "forward",
        lambda own, inputs, **options: (given.append(options.get("bonus")), forward(own, inputs, **options))[1],
    )
    return given


def of_float32(length, dims=(13, 11)):
    """Query, key, value and a decay, of a chunk and a part of one; keys so short that states stay small."""
    query, key, value = (tensor.float() for tensor in inputs(length, key_heads=4, dims=dims))
    return query, key / 4, value, -torch.rand(2, 4, length, dims[0]) / 4


@pytest.mark.parametrize("scale", [1.0, None, 0.3])
@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("shape", BONUSES.values(), ids=BONUSES)
def test_one_pass_in_float32(passes, shape, axes, scale):
    query, key, value, decay = of_float32(67)
    gate = None if not axes else decay[..., 0] if axes == 3 else decay
    options: dict[str, Any] = RAW | {"scale": scale}
    scaled = query.double() * (13**-0.5 if scale is None else scale)
    for bonus in (torch.randn(shape), torch.randn(*shape, 2)[..., 0]):  # the second with gaps
        found = regard.linear_attention(query, key, value, bonus=bonus, decay=gate, **options)
        exact = scaled, key.double(), value.double(), bonus.double()
        expected, _ = by_steps(*exact, None if gate is None else gate.double())
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        assert passes.pop() is bonus


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 131])
def test_passes_over_whole_chunks_and_parts(passes, length):
    """With gradients the same outputs and those of the formula."""
    query, key, value, decay = of_float32(length)
    decay[:, :, length // 2] = -torch.inf  # forgets all
    bonus = torch.randn(1, 4, 1, 13)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value, bonus, decay)]
    expected, _ = by_steps(*exact)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, bonus, decay)]
    with torch.no_grad():
        found = regard.linear_attention(query, key, value, bonus=bonus, decay=decay, **RAW)
        assert passes == [bonus]
    learned = regard.linear_attention(query, key, value, bonus=bonus, decay=decay, **RAW)
    assert torch.equal(found, learned)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    above = torch.randn_like(found)
    options = {"allow_unused": True, "materialize_grads": True}  # nothing reads the decay of one token
    gradients = [
        torch.autograd.grad(learned, leaves, above, **options),
        torch.autograd.grad(expected, exact, above.double(), **options),
    ]
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


def test_value_columns_in_parts(passes, two_threads):
    leaves = [(torch.randn(1, 1, 131, 96) / 8).requires_grad_() for _ in range(3)]
    leaves.append(torch.randn(1, 1, 1, 96).requires_grad_())
    exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
    found = regard.linear_attention(*leaves[:3], bonus=leaves[3], **RAW)
    expected, _ = by_steps(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert passes == [leaves[3]]
    above = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, above), torch.autograd.grad(expected, exact, above.double())
    for own, other in zip(*gradients, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)


def test_second_derivatives_and_many_gradients_at_once(passes):
    query, key, value, decay = of_float32(23)
    exact = [tensor.double().requires_grad_() for tensor in (query, key, value, torch.randn(1, 4, 1, 1), decay)]
    leaves = [tensor.detach().float().requires_grad_() for tensor in exact]
    found = regard.linear_attention(*leaves[:3], bonus=leaves[3], decay=leaves[4], **RAW)
    assert passes == [leaves[3]]
    results = []
    for output, inputs_of_it in ((found, leaves), (by_steps(*exact)[0], exact)):
        seeds = torch.linspace(-1.0, 1.0, 3 * output.numel(), dtype=output.dtype).view(3, *output.shape)
        many = torch.autograd.grad(output, inputs_of_it, seeds, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(output, inputs_of_it, seeds[0], create_graph=True)
        second = torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), inputs_of_it)
        results.append([*many, *first, *second])
    for own, other in zip(*results, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(own.double() / scale, other / scale, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("place", range(4))
def test_what_is_not_finite_is_not_left_to_a_pass(place):
    tensors = [*of_float32(67)[:3], torch.randn(1, 4, 1, 13)]
    clean = regard.linear_attention(*tensors[:3], bonus=tensors[3], **RAW)
    tensors[place][0, 1, 0 if place == 3 else 40, 3] = torch.nan
    found = regard.linear_attention(*tensors[:3], bonus=tensors[3], **RAW)
    first = 0 if place == 3 else 40
    rows = slice(first, 41 if place == 0 else None)
    assert found[0, 1, rows].isnan().any(-1).all()
    if place < 3:
        torch.testing.assert_close(found[0, 1, :40], clean[0, 1, :40], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0, 0], clean[0, 0], rtol=1e-5, atol=1e-5)


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
