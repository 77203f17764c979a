"""Long sequences, which are rotated in chunks on a CPU: the same numbers and derivatives as whole."""

import pytest
import torch
from torch.autograd import forward_ad

from regard.positions import Rotary, rotary

LAYOUTS = ("half", "interleaved")
SHAPES = [(2, 3, 7, 9), (3, 7, 9), (7, 9), (2, 3, 1, 9)]


@pytest.fixture(params=[1, 40, 150])
def chunked(request, monkeypatch):
    """Chunks of one row of the sequence, and of a few, so that small tensors have several."""
    taken, original = [], rotary.ChunkedRotary

    class Recorded(original):
        @staticmethod
        def forward(ctx, *given):
            taken.append(given[0].shape)
            return original.forward(ctx, *given)

    monkeypatch.setattr(rotary, "NUMBERS_AT_ONCE", request.param)
    monkeypatch.setattr(rotary, "ChunkedRotary", Recorded)
    return taken


def whole(rotation, tensor):
    """By the path of tensors that are no longer than a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "NUMBERS_AT_ONCE", 10**9)
        return rotation.rotate(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_same_numbers(layout, shape, dtype, chunked):
    tensor = torch.randn(shape).to(dtype)
    length = shape[-2]
    places = [torch.arange(length)] + [torch.randint(0, 99, (shape[0], length))] * (len(shape) > 2)
    for positions in places:
        rotation = Rotary(6, layout=layout).rotation(positions)
        assert rotation.rotate(tensor).equal(whole(rotation, tensor))
        strided = tensor.transpose(0, -2).contiguous().transpose(0, -2)
        assert rotation.rotate(strided).equal(whole(rotation, tensor))
    assert len(chunked) == (2 * len(places) if tensor.numel() > rotary.NUMBERS_AT_ONCE else 0)


# torch's own, when it loads its forward derivatives
forward_mode = pytest.mark.filterwarnings("ignore:.*torch.jit.script")


@forward_mode
@pytest.mark.parametrize("layout", LAYOUTS)
def test_derivatives(layout, chunked):
    tensor = torch.randn(2, 1, 4, 7, dtype=torch.float64, requires_grad=True)
    rotation = Rotary(6, layout=layout).rotation(torch.tensor([[0, 3, 9, 2]]), dtype=torch.float64)
    assert torch.autograd.gradcheck(rotation.rotate, tensor, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda t: rotation.rotate(t).sin(), tensor)
    assert (tuple(tensor.shape) in chunked) == (tensor.numel() > rotary.NUMBERS_AT_ONCE)


@forward_mode
def test_tangents(chunked):
    tensor, tangent = torch.randn(2, 3, 7, 8, dtype=torch.float64), torch.randn(2, 3, 7, 8, dtype=torch.float64)
    rotation = Rotary(8).rotation(torch.arange(7), dtype=torch.float64)
    with forward_ad.dual_level():
        turned = rotation.rotate(forward_ad.make_dual(tensor, tangent))
        of_turned = forward_ad.unpack_dual(turned).tangent
    assert of_turned is not None
    assert of_turned.equal(whole(rotation, tangent))


def test_long_sequences_are_rotated_in_chunks_and_short_ones_are_not(monkeypatch):
    lengths, original = [], rotary._rotate

    def recorded(tensor, *of):
        lengths.append(tensor.shape[-2])
        return original(tensor, *of)

    monkeypatch.setattr(rotary, "_rotate", recorded)
    chunk = rotary.NUMBERS_AT_ONCE // 64
    for length in (chunk, chunk + 1, 3 * chunk):
        Rotary(64).rotate(torch.randn(length, 64), torch.arange(length))
    assert lengths == [chunk, chunk, 1, chunk, chunk, chunk]


def test_frequencies_that_learn_get_their_gradient(chunked):
    """A rotation whose cosines ask for a gradient is no constant."""
    angles = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    tensor = torch.randn(2, 7, 6, dtype=torch.float64)

    def rotated(angles):
        return rotary.apply_rotary(tensor, angles.cos(), angles.sin(), "half")

    assert torch.autograd.gradcheck(rotated, angles)
    assert not chunked
