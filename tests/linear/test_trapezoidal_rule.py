"""Mamba-3's recurrence by the trapezoidal rule, with rotations as complex decays, against its steps in float64."""

import pytest
import torch

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import Identity, linear_attention, trapezoidal_attention

DIM, WIDTH, ANGLES = 7, 3, 2


def inputs(length=37, heads=4, key_heads=2):
    def drawn(*shape):
        return torch.randn(2, *shape, dtype=torch.float64)

    rows = drawn(heads, length, DIM), drawn(key_heads, length, DIM), drawn(key_heads, length, WIDTH)
    decay = -drawn(key_heads, length).exp() / 4
    return {
        **dict(zip(("query", "key", "value"), rows, strict=True)),
        "step": drawn(key_heads, length).exp(),
        "decay": decay,
        "blend": drawn(key_heads, length).sigmoid(),
        "angles": drawn(key_heads, length, ANGLES),
    }


def by_complex_steps(query, key, value, step, decay, blend, angles):
    """Pairs of dims are complex numbers, whose state decays by e^(g - iΔθ); the others are real numbers."""

    def as_complex(rows):
        pairs = torch.view_as_complex(rows[..., : 2 * ANGLES].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat([pairs, rows[..., 2 * ANGLES :].to(torch.complex128)], -1)

    group = query.shape[1] // key.shape[1]
    query, key = as_complex(query), as_complex(key)
    turns = torch.cat([angles, angles.new_zeros(*angles.shape[:-1], key.shape[-1] - ANGLES)], -1) * step[..., None]
    state = torch.zeros(*key.shape[:2], key.shape[-1], WIDTH, dtype=torch.complex128)
    before, rows = torch.zeros_like(state), []
    for t in range(key.shape[2]):
        fade = torch.exp(decay[:, :, t, None] - 1j * turns[:, :, t]).unsqueeze(-1)
        added = key[:, :, t, :, None] * value[:, :, t, None]
        size, share = step[:, :, t, None, None], blend[:, :, t, None, None]
        state = fade * state + size * ((1 - share) * fade * before + share * added)
        before = added
        rows.append((query[:, :, t, :, None].conj() * state.repeat_interleave(group, 1)).real.sum(-2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", [1, 2, 37, 131])
def test_it_is_the_recurrence_of_complex_decays(length):
    given = inputs(length)
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    results = trapezoidal_attention(**given), by_complex_steps(**given)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    gradients = [torch.autograd.grad(each, leaves, upstream, allow_unused=True) for each in results]
    for name, one, other in zip(given, *gradients, strict=True):
        torch.testing.assert_close(one, other if other is not None else torch.zeros_like(given[name]), msg=name)


def test_a_blend_of_one_is_mamba_2():
    given = inputs()
    given["blend"] = torch.ones_like(given["blend"])
    ours = trapezoidal_attention(**{**given, "angles": None})
    theirs = linear_attention(
        *(given["query"], given["key"], given["step"].unsqueeze(-1) * given["value"]),
        feature_map=Identity(),
        normalize=False,
        causal=True,
        scale=1.0,
        decay=given["decay"],
    )
    torch.testing.assert_close(ours, theirs)


def test_steps_of_zero_and_no_tokens():
    given = inputs()
    given["step"][:, :, 5:9] = 0  # as padding has
    torch.testing.assert_close(trapezoidal_attention(**given), by_complex_steps(**given))
    assert trapezoidal_attention(**inputs(0)).shape == (2, 4, 0, WIDTH)


def test_one_head_in_half_precision():
    given = {name: tensor[0, 0] for name, tensor in inputs(heads=2).items()}
    low = {name: tensor.bfloat16() for name, tensor in given.items()}
    found = trapezoidal_attention(**low)
    exact = by_complex_steps(**{name: tensor.double()[None, None] for name, tensor in low.items()})[0, 0]
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step": -torch.ones(1, 1, 1)}, ConfigurationError, "step has values from -1 to -1; it needs values of at le"),
        ({"blend": torch.full((1, 1, 37), 1.5)}, ConfigurationError, r"blend .* it needs values in 0\.\.1: pass it af"),
        ({"angles": torch.ones(2, 2, 37, 4)}, ShapeError, "turn 8 dims, but keys have 7: pass at most 3"),
        ({"step": torch.ones(2, 2, 36)}, ShapeError, r"step has the shape \(2, 2, 36\); .* needs \(2, 2, 37\)"),
        ({"blend": torch.ones(2, 2, 37, dtype=torch.int64)}, DtypeError, "blend needs a floating-point tensor"),
        ({"decay": torch.ones(2, 2, 37)}, ConfigurationError, "decay has values up to 1; it is the logarithm"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        trapezoidal_attention(**{**inputs(), **change})
