"""The selective scan of Mamba-1, against its steps in float64 and against transformers' layer."""

from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import selective_scan, selective_scan_with_state, state_space

CHANNELS, STATES = 7, 5


def inputs(length=37, batch=(2,)) -> dict[str, Any]:
    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    return {
        "query": drawn(*batch, length, STATES),
        "key": drawn(*batch, length, STATES),
        "value": drawn(*batch, length, CHANNELS),
        "step": drawn(*batch, length, CHANNELS).exp() / 4,
        "rates": -drawn(CHANNELS, STATES).exp(),
        "skip": drawn(CHANNELS),
        "state": drawn(*batch, CHANNELS, STATES),
    }


def by_steps(query, key, value, step, rates, skip, state):
    rows = []
    for t in range(value.shape[-2]):
        size = step[..., t, :, None]
        state = (size * rates).exp() * state + size * value[..., t, :, None] * key[..., t, None, :]
        rows.append((state * query[..., t, None, :]).sum(-1) + skip * value[..., t, :])
    return torch.stack(rows, -2), state


@pytest.mark.parametrize("segment", [4, 10, 1000])
@pytest.mark.parametrize("length", [1, 2, 37])
def test_it_is_the_recurrence_in_segments_of_any_length(segment, length, monkeypatch):
    entries = 2 * CHANNELS * STATES * segment
    monkeypatch.setattr(state_space, "ENTRIES", entries)
    monkeypatch.setattr(state_space, "ENTRIES_WITH_GRADIENT", entries)
    given = inputs(length)
    expected = by_steps(**given)
    torch.testing.assert_close(selective_scan_with_state(**given), expected)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    expected, found = by_steps(**given), selective_scan_with_state(**given)
    torch.testing.assert_close(found, expected)
    seeds = [torch.randn_like(each) for each in expected]
    for one, other in zip(*(torch.autograd.grad(each, leaves, seeds) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_compiled_into_one_graph():
    given = inputs()
    compiled = torch.compile(selective_scan_with_state, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given), by_steps(**given))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by torch's forward mode
def test_a_second_derivative_and_transforms():
    given = inputs(5, ())
    names = [*given]

    def of(*tensors):
        return selective_scan(**dict(zip(names, tensors, strict=True)))

    leaves = tuple(tensor.requires_grad_() for tensor in given.values())
    assert torch.autograd.gradgradcheck(of, leaves)
    plain = tuple(tensor.detach() for tensor in leaves)
    over_batch = torch.func.vmap(of)(*(torch.stack([tensor, tensor]) for tensor in plain))
    torch.testing.assert_close(over_batch[1], of(*plain))
    tangents = tuple(torch.randn_like(tensor) for tensor in plain)
    forward = torch.func.jvp(of, plain, tangents)[1]
    upstream = torch.randn_like(forward)
    backward = torch.autograd.grad(of(*leaves), leaves, upstream)
    along = torch.stack([(one * other).sum() for one, other in zip(backward, tangents, strict=True)]).sum()
    torch.testing.assert_close((forward * upstream).sum(), along)


def test_a_state_continues_and_leading_axes_broadcast():
    given = inputs()
    whole, final = selective_scan_with_state(**given)
    parts, state = [], given["state"]
    for part in (slice(0, 20), *(slice(t, t + 1) for t in range(20, 37))):
        own = {name: given[name][:, part] for name in ("query", "key", "value", "step")}
        rows, state = selective_scan_with_state(**own, rates=given["rates"], skip=given["skip"], state=state)
        parts.append(rows)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, final)
    shared = {**given, "key": given["key"][:1], "step": given["step"][:1, :, :1]}
    everywhere = {**shared, "key": shared["key"].expand(2, -1, -1), "step": shared["step"].expand_as(given["step"])}
    torch.testing.assert_close(selective_scan(**shared), by_steps(**everywhere)[0])


def test_no_tokens_and_half_precision():
    given = inputs(0)
    rows, state = selective_scan_with_state(**given)
    assert rows.shape == (2, 0, CHANNELS)
    assert torch.equal(state, given["state"])
    low = {name: each.bfloat16() for name, each in inputs().items()}
    found, exact = selective_scan(**low), by_steps(**{name: each.double() for name, each in low.items()})[0]
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_it_is_the_scan_of_transformers_layer():
    from transformers import MambaConfig, MambaModel

    torch.manual_seed(0)
    config = MambaConfig(vocab_size=11, hidden_size=12, num_hidden_layers=1, state_size=STATES, time_step_rank=3)
    layer: Any = MambaModel(config).double().eval().layers[0]
    layer = layer.mixer
    tokens = torch.randn(2, 37, 12, dtype=torch.float64)
    value, gate = layer.in_proj(tokens).chunk(2, -1)
    value = torch.nn.functional.silu(layer.conv1d(value.mT)[..., :37]).mT
    step, key, query = layer.x_proj(value).split([3, STATES, STATES], -1)
    step = torch.nn.functional.softplus(layer.dt_proj(step))
    rows = selective_scan(query, key, value, step=step, rates=-layer.A_log.exp(), skip=layer.D)
    found = layer.out_proj(rows * torch.nn.functional.silu(gate))
    theirs = layer(tokens)  # which has the rates in float32
    assert (found - theirs).abs().max() < 64 * torch.finfo(torch.float32).eps * theirs.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rates": torch.ones(7, 5)}, ConfigurationError, "rates has values up to 1; it is the logarithm"),
        ({"step": -torch.ones(1, 1, 1)}, ConfigurationError, "step has values from -1 to -1; it needs values of at le"),
        ({"step": torch.ones(2, 37, 3)}, ShapeError, r"step has the shape \(2, 37, 3\)"),
        ({"step": torch.ones(2, 37)}, ShapeError, r"step has the shape \(2, 37\); .* needs \(2, 37, 7\)"),
        ({"rates": -torch.ones(5, 7)}, ShapeError, r"rates has the shape \(5, 7\); it needs \(7, 5\)"),
        ({"skip": torch.ones(5)}, ShapeError, r"skip has the shape \(5,\); it needs \(7,\)"),
        ({"state": torch.ones(7, 5)}, ShapeError, r"state has the shape \(7, 5\); it needs \(2, 7, 5\)"),
        ({"key": torch.ones(2, 36, 5).double()}, ShapeError, r"they need \(\.\.\., N, states\) twice"),
        ({"key": torch.ones(2, 37, 5)}, DtypeError, "key"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        selective_scan(**{**inputs(), **change})
