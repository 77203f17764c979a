"""Errors of rotary positions and their messages."""

import math

import pytest
import torch

from regard.errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from regard.positions import Rotary


def rand(*shape):
    return torch.randn(shape)


@pytest.mark.parametrize("dim", [0, 1, 7, -4, True, 8.0])
def test_dim_is_even(dim):
    with pytest.raises(ConfigurationError, match=f"^Rotary needs an even dim of 2 or more, .* it is {dim!r}$"):
        Rotary(dim)


@pytest.mark.parametrize("base", [1.0, 0.0, math.inf, math.nan])
def test_base_is_above_one(base):
    with pytest.raises(ConfigurationError, match=f"^Rotary needs a finite base above 1, .* it is {base!r}$"):
        Rotary(8, base)


@pytest.mark.parametrize(("layout", "hint"), [("halves", "did you mean 'half'"), ("neox", "Known: 'half', 'interlea")])
def test_layouts_are_known(layout, hint):
    with pytest.raises(ConfigurationError, match=f"^Rotary has no layout {layout!r}; {hint}"):
        Rotary(8, layout=layout)


def test_a_scaling_is_a_scaling():
    match = r"^Rotary needs a scaling of regard.positions, LinearScaling\(factor=2.0\) for instance; it is 'yarn'$"
    with pytest.raises(ConfigurationError, match=match):
        Rotary(8, scaling="yarn")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_positions_are_whole_numbers(dtype):
    match = rf"^Rotary\(dim=4, .*\) needs positions that are whole numbers; they are {dtype}: call .long\(\)$"
    with pytest.raises(DtypeError, match=match):
        Rotary(4).rotate(rand(3, 4), torch.zeros(3, dtype=dtype))


def test_positions_are_a_tensor():
    with pytest.raises(DtypeError, match="needs positions as a torch.Tensor of whole numbers; they are a range: torch"):
        Rotary(4).rotate(rand(3, 4), range(3))  # type: ignore[arg-type]


def test_positions_have_an_axis():
    match = r"needs positions of the shape \(length,\) or \(\*batch, length\); these have no axis: call .unsqueeze\(0\)"
    with pytest.raises(ShapeError, match=match):
        Rotary(4).rotate(rand(1, 4), torch.tensor(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_cosines_are_not_narrow(dtype):
    match = f"^a rotation needs cosines and sines in torch.float32 or torch.float64; dtype is {dtype}. Rotated"
    with pytest.raises(DtypeError, match=match):
        Rotary(4).rotation(torch.arange(3), dtype=dtype)


@pytest.mark.parametrize(
    ("wrong", "has"), [(torch.ones(3, 4).long(), "torch.int64"), (torch.ones(3, 4) + 0j, "torch.c"), ([1.0], "a list")]
)
def test_a_rotated_tensor_is_floating_point(wrong, has):
    with pytest.raises(DtypeError, match=f"^a rotation needs a floating-point tensor; this is {has}"):
        Rotary(4).rotate(wrong, torch.arange(3))


def test_a_rotated_tensor_is_on_the_device_of_the_positions():
    match = "^the tensor to rotate is on meta, but the positions of the rotation are on cpu: move one of them with .to"
    with pytest.raises(DeviceError, match=match):
        Rotary(4).rotate(torch.ones(3, 4, device="meta"), torch.arange(3))


def test_a_rotated_tensor_has_a_length():
    match = r"^a rotation needs \(..., heads, length, head_dim\), .*; this tensor has the shape \(4,\)$"
    with pytest.raises(ShapeError, match=match):
        Rotary(4).rotate(rand(4), torch.arange(4))


def test_head_dim_is_enough():
    match = (
        r"^a rotation of 8 features cannot rotate a tensor whose head_dim is 6 \(shape \(2, 3, 6\)\): create "
        "Rotary with a dim of 6 or less$"
    )
    with pytest.raises(ShapeError, match=match):
        Rotary(8).rotate(rand(2, 3, 6), torch.arange(3))


@pytest.mark.parametrize(
    ("shape", "positions", "need"),
    [
        ((2, 3, 5, 4), (4,), r"\(5,\), one for each of its 5 tokens, or \(2, 5\) if"),
        ((2, 3, 5, 4), (1,), r"\(5,\), one for each"),
        ((2, 3, 5, 4), (3, 5), r"or \(2, 5\) if sequences have their own"),
        ((2, 3, 5, 4), (2, 3, 5), r"or \(2, 5\) if"),
        ((3, 5, 4), (2, 5), r"or \(3, 5\) if"),
        ((5, 4), (1, 5), r"or \(5,\) if"),
        ((1, 3, 5, 4), (2, 5), r"or \(1, 5\) if"),
    ],
)
def test_positions_fit(shape, positions, need):
    at = torch.zeros(positions, dtype=torch.int64)
    match = rf"^positions of the shape \({', '.join(map(str, positions))},?\) do not fit a tensor of the shape .*{need}"
    with pytest.raises(ShapeError, match=match):
        Rotary(4).rotate(rand(*shape), at)
