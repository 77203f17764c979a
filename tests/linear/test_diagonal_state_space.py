"""S4D: the convolution in chunks, against a step for each position in complex128."""

from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import diagonal_state_space, diagonal_state_space_with_state, selective_scan

CHANNELS, STATES = 5, 3


def inputs(length=37) -> dict[str, Any]:
    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    rates = torch.complex(-drawn(CHANNELS, STATES).exp() / 4, 3 * drawn(CHANNELS, STATES))
    rates[0, 0], rates[1, 1] = 0, torch.tensor(1e-5j)  # where (e^z - 1) / z is by its series
    return {
        "value": drawn(2, length, CHANNELS),
        "step": drawn(CHANNELS).exp() / 4,
        "rates": rates,
        "weights": torch.complex(drawn(CHANNELS, STATES), drawn(CHANNELS, STATES)),
        "skip": drawn(CHANNELS),
        "state": torch.complex(drawn(2, CHANNELS, STATES), drawn(2, CHANNELS, STATES)),
    }


def by_steps(value, step, rates, weights, skip, state, discretization="zero-order hold"):
    z = step[:, None] * rates
    if discretization == "bilinear":
        factor, written = (1 + z / 2) / (1 - z / 2), step[:, None] / (1 - z / 2)
    else:
        factor, term, written = z.exp(), torch.ones_like(z), torch.zeros_like(z)
        for count in range(1, 80):  # (e^z - 1) / A = Δ (1 + z/2 + z²/6 + ...), for A = 0 too
            term = term / count
            written = written + step[:, None] * term
            term = term * z.where(z.abs() < 1, 0)
        large = z.abs() >= 1
        written = torch.where(large, (factor - 1) / rates.masked_fill(~large, 1.0), written)
    rows = []
    for x in value.unbind(1):
        state = factor * state + written * x[..., None]
        rows.append(2 * (weights * state).sum(-1).real + skip * x)
    return torch.stack(rows, 1), state


@pytest.mark.parametrize("rule", ["zero-order hold", "bilinear"])
@pytest.mark.parametrize("length", [1, 37, 64, 65, 131])
def test_it_takes_each_step(length, rule):
    given = inputs(length)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    found = diagonal_state_space_with_state(**given, discretization=rule)
    expected = by_steps(**given, discretization=rule)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    upstream = [torch.randn_like(each) for each in found]
    ours, theirs = (torch.autograd.grad(each, leaves, upstream) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_a_bilinear_step_that_forgets_everything():
    """Of Δ A = -2 the factor is 0, which has no logarithm; its slope is that of the next position."""
    given = inputs(7)
    given["step"], given["rates"] = torch.full_like(given["step"], 2.0), torch.full_like(given["rates"], -1.0)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    found = diagonal_state_space_with_state(**given, discretization="bilinear")
    expected = by_steps(**given, discretization="bilinear")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    upstream = [torch.randn_like(each) for each in found]
    ours, theirs = (torch.autograd.grad(each, leaves, upstream) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_real_rates_are_a_selective_scan_of_constant_numbers():
    given = inputs(131)
    rates, step, value = given["rates"].real, given["step"], given["value"]
    written = torch.expm1(step[:, None] * rates) / (step[:, None] * rates).clamp(max=-1e-9)
    key = torch.ones(2, 131, STATES, dtype=torch.float64)
    for channel in range(2, CHANNELS):  # a scan has the keys and queries of all channels
        one = slice(channel, channel + 1)
        weights = given["weights"].real[channel] * written[channel]
        scanned = selective_scan(
            *(2 * weights.expand_as(key), key, value[..., one]),
            step=step[one].expand(2, 131, 1),
            rates=rates[one],
        )
        told = {name: given[name][one] for name in ("rates", "weights")}
        real: dict[str, Any] = {
            name: torch.complex(each.real, torch.zeros_like(each.real)) for name, each in told.items()
        }
        torch.testing.assert_close(diagonal_state_space(value[..., one], step=step[one], **real), scanned)


def test_many_turns_lose_no_digits_in_float32():
    """S4D-Lin of 32 states and large steps: the angle of a chunk is more than 6,000 radians."""
    low: dict[str, Any] = {
        "value": torch.randn(1, 331, 2),
        "step": torch.tensor([0.125, 1.0]),
        "rates": torch.complex(torch.full((2, 32), -0.5), torch.pi * torch.arange(32.0).expand(2, 32)),
        "weights": torch.randn(2, 32, dtype=torch.complex64),
        "skip": torch.randn(2),
        "state": torch.randn(1, 2, 32, dtype=torch.complex64),
    }
    wide: dict[str, Any] = {
        name: each.to(torch.complex128) if each.is_complex() else each.double() for name, each in low.items()
    }
    (found, state), (exact, last) = diagonal_state_space_with_state(**low), by_steps(**wide)
    assert found.dtype is torch.float32
    assert state.dtype is torch.complex64
    assert (found - exact).abs().max() < 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert (state - last).abs().max() < 64 * torch.finfo(torch.float32).eps * last.abs().max()


def test_no_positions_no_states_and_half_precision():
    given = inputs(0)
    rows, state = diagonal_state_space_with_state(**given)
    assert rows.shape == (2, 0, CHANNELS)
    assert torch.equal(state, given["state"])
    given = inputs()
    none = {name: given[name][:, :0] for name in ("rates", "weights")}
    found = diagonal_state_space(given["value"], step=given["step"], skip=given["skip"], **none)
    torch.testing.assert_close(found, given["skip"] * given["value"])
    half = diagonal_state_space(**{**given, "value": given["value"].bfloat16()})
    exact, _ = by_steps(**{**given, "value": given["value"].bfloat16().double()})
    assert half.dtype is torch.bfloat16
    assert (half - exact).abs().max() < torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step": -torch.ones(5)}, ConfigurationError, "step has values down to -1; it needs values of at least 0"),
        ({"rates": torch.ones(5, 3) + 0j}, ConfigurationError, "rates has real parts up to 1; they need to be at most"),
        (
            {"rates": -torch.ones(5, 3)},
            DtypeError,
            r"rates is torch.float32; it needs complex numbers: rates.to\(torch",
        ),
        ({"skip": torch.ones(5) + 1j}, DtypeError, "skip is torch.complex64; it needs real numbers"),
        ({"weights": torch.ones(5, 2) + 0j}, ShapeError, r"weights has the shape \(5, 2\); it needs \(5, 3\)"),
        ({"rates": torch.ones(4, 3) + 0j}, ShapeError, r"rates has the shape \(4, 3\); it needs \(5, states\)"),
        (
            {"value": torch.ones(5)},
            ShapeError,
            r"value has the shape \(5,\) and torch.float32; it needs \(\.\.\., N, c",
        ),
        ({"step": 0.1}, DtypeError, r"step needs a torch.Tensor; it is a float: pass torch.as_tensor\(step\)"),
        ({"rates": None}, DtypeError, "rates needs a torch.Tensor; it is None"),
        ({"state": [1.0]}, DtypeError, "state needs a torch.Tensor; it is a list"),
        ({"discretization": "euler"}, ConfigurationError, "discretization is 'euler'; it needs 'zero-order hold' or"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        diagonal_state_space(**{**inputs(), **change})
