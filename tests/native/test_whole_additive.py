"""Additive scores over all pairs at once, beside tiles of them and float64: sizes around strips, bands and vectors."""

import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.additive_tiles import AdditiveBackward, AdditiveForward, AdditiveScores
from regard.backends.cpu.whole_additive import WholeAdditiveInC
from regard.core.score_forms import AdditivePairs

pytestmark = pytest.mark.usefixtures("built")

SIZES = (
    # batch, heads, key heads, rows, columns, features, dim of values
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 1, 1, 63, 7, 31),
    (2, 4, 2, 3, 64, 16, 33),
    (1, 3, 3, 37, 65, 17, 5),
    (2, 2, 1, 33, 130, 33, 8),
    (1, 2, 2, 5, 11, 0, 4),
)


def drawn(sizes: tuple[int, ...], dtype: torch.dtype, scale: float) -> tuple[AdditivePairs, Tensor, Tensor]:
    batch, heads, key_heads, rows, columns, features, dim = sizes
    torch.manual_seed(0)
    query, key = (
        scale * torch.randn(batch, heads, rows, features),
        scale * torch.randn(batch, key_heads, columns, features),
    )
    value, above = torch.randn(batch, key_heads, columns, dim), torch.randn(batch, heads, rows, dim)
    return AdditivePairs(query.to(dtype), key.to(dtype), torch.randn(features)), value.to(dtype), above.to(dtype)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [0.1, 3.0, 60.0], ids=["tangents", "exponentials", "per pair"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_it_has_the_numbers_of_tiles(sizes, dtype, scale, softcap, masked):
    pairs, value, above = drawn(sizes, dtype, scale)
    absent = None
    if masked:
        absent = torch.zeros(*pairs.query.shape[:3], value.shape[2])
        absent.masked_fill_(torch.rand(absent.shape) < 0.3, -math.inf)[:, :, 0] = -math.inf
    whole = WholeAdditiveInC.prepare(pairs, value, softcap, absent)
    assert whole is not None  # so little work is one thread's
    output, lse = whole.forward(pairs, value)
    scores = AdditiveScores(pairs.query.flatten(0, 1), pairs.key.flatten(0, 1), pairs.weight)
    tiles = AdditiveForward(scores, value.flatten(0, 1), softcap)
    tiles.add(bias=absent)
    assert torch.equal(output.flatten(0, 1), tiles.output)
    assert torch.equal(lse.flatten(0, 1), tiles.lse)
    rows = tiles.lse.masked_fill(tiles.lse == -math.inf, math.inf)
    given = value.flatten(0, 1), tiles.output, rows, above.flatten(0, 1), torch.zeros_like(tiles.lse)
    work = AdditiveBackward(scores, *given, softcap=softcap)
    work.add(bias=absent)
    query, key, weight, of_value = work.result()
    found = whole.backward(pairs, value, output, lse, above)
    for has, needs in zip(found, (query, key, weight, of_value), strict=True):
        assert has.isfinite().all()
        once = max(torch.finfo(has.dtype).eps, 1e-6)  # 16 bits may be rounded another way
        torch.testing.assert_close(has, needs.reshape(has.shape).to(has.dtype), rtol=once, atol=1e-6)


def test_tensors_of_any_strides():
    pairs, value, above = drawn((2, 4, 2, 9, 21, 6, 5), torch.float32, 1.0)
    whole = WholeAdditiveInC.prepare(pairs, value, None, None)
    assert whole is not None  # so little work is one thread's

    def spread(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    apart = AdditivePairs(spread(pairs.query), pairs.key.mT.contiguous().mT, torch.stack([pairs.weight] * 2, 1)[:, 0])
    expected, found = whole.forward(pairs, value), whole.forward(apart, spread(value))
    assert torch.equal(expected[0], found[0])
    gradients = [
        whole.backward(each, given, *expected, upstream)
        for each, given, upstream in ((pairs, value, above), (apart, spread(value), spread(above)))
    ]
    for has, needs in zip(*gradients, strict=True):
        assert torch.equal(has, needs)
