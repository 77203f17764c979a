"""Long sequences, which a CPU turns a stretch at a time: the same numbers as whole, the same derivatives."""

import pytest
import torch
from torch.autograd import forward_ad

from regard.positions import Rotary, rotary

LAYOUTS = ("half", "interleaved")
SHAPES = [(2, 3, 7, 9), (3, 7, 9), (7, 9), (2, 3, 1, 9)]


@pytest.fixture(params=[1, 40, 150])
def stretched(request, monkeypatch):
    """Stretches of one row of the sequence, and of a few, so that small tensors have several."""
    taken, original = [], rotary.Stretches

    class Watched(original):
        @staticmethod
        def forward(ctx, *given):
            taken.append(given[0].shape)
            return original.forward(ctx, *given)

    monkeypatch.setattr(rotary, "STRETCH", request.param)
    monkeypatch.setattr(rotary, "Stretches", Watched)
    return taken


def whole(rotation, tensor):
    """By the path of tensors that are no longer than a stretch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "STRETCH", 10**9)
        return rotation.turn(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_numbers(layout, shape, dtype, stretched):
    tensor = torch.randn(shape).to(dtype)
    length = shape[-2]
    places = [torch.arange(length)] + [torch.randint(0, 99, (shape[0], length))] * (len(shape) > 2)
    for positions in places:
        rotation = Rotary(6, layout=layout).rotation(positions)
        assert rotation.turn(tensor).equal(whole(rotation, tensor))
        strided = tensor.transpose(0, -2).contiguous().transpose(0, -2)
        assert rotation.turn(strided).equal(whole(rotation, tensor))
    assert len(stretched) == (2 * len(places) if tensor.numel() > rotary.STRETCH else 0)


# torch's own, when it loads its forward derivatives
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@forward_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives(layout, stretched):
    tensor = torch.randn(2, 1, 4, 7, dtype=torch.float64, requires_grad=True)
    rotation = Rotary(6, layout=layout).rotation(torch.tensor([[0, 3, 9, 2]]), dtype=torch.float64)
    assert torch.autograd.gradcheck(rotation.turn, tensor, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: rotation.turn(t).sin(), tensor)
    assert (tuple(tensor.shape) in stretched) == (tensor.numel() > rotary.STRETCH)


@forward_mode
def test_tangents(stretched):
    tensor, tangent = torch.randn(2, 3, 7, 8, dtype=torch.float64), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    rotation = Rotary(8).rotation(torch.arange(7), dtype=torch.float64)
    with forward_ad.dual_level():
        turned = rotation.turn(forward_ad.make_dual(tensor, tangent))
        of_turned = forward_ad.unpack_dual(turned).tangent
    assert of_turned is not None
    assert of_turned.equal(whole(rotation, tangent))


def test_long_sequences_come_in_stretches_and_short_ones_do_not(monkeypatch):
    lengths, original = [], rotary._whole

    def watched(tensor, *of):
        lengths.append(tensor.shape[-2])
        return original(tensor, *of)

    monkeypatch.setattr(rotary, "_whole", watched)
    stretch = rotary.STRETCH // 64
    for length in (stretch, stretch + 1, 3 * stretch):
        Rotary(64).turn(torch.randn(length, 64), torch.arange(length))
    assert lengths == [stretch, stretch, 1, stretch, stretch, stretch]


def test_frequencies_that_learn_get_their_gradient(stretched):
    """A rotation whose cosines ask for a gradient is no constant."""
    angles = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    tensor = torch.randn(2, 7, 6, dtype=torch.float64)

    def turned(angles):
        return rotary.turned(tensor, angles.cos(), angles.sin(), "half")

    assert torch.autograd.gradcheck(turned, angles)
    assert not stretched
