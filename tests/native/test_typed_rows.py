"""Every bit pattern of float16 and bfloat16 is widened exactly, and float32 is rounded to them as torch does."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.backends.cpu import library
from regard.backends.cpu.few_queries import attend_few_queries
from regard.backends.cpu.flash_tiles import FlashProblem
from regard.backends.cpu.gemv import matmul_few_rows
from regard.core.dropout import DropoutHashes
from regard.tiles.tile_bits import TileBits

pytestmark = pytest.mark.usefixtures("built")

HALVES = torch.bfloat16, torch.float16
BLOCK = KEYS = DIM = 64


def all_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def one_tile(rows: int) -> TileBits:
    """Rows that attend to a single key."""
    blocks = -(-rows // BLOCK)
    runs = np.tile(np.array([[0, 1, -1]], dtype=np.int64), (blocks, 1))
    return TileBits(np.arange(blocks + 1, dtype=np.int64), runs, np.zeros((1, 1, 1, BLOCK), dtype=np.uint64))


def mean_by_native_code(lower: Tensor, upper: Tensor, share: int, *, times: float = 1.0) -> Tensor:
    """The mean of KEYS halves, `share` of which are the upper ones, times a factor, as native code rounds it.

    Of equal weights, a power of two in number: sums of neighbours are exact in float32. Dropout that drops nothing
    divides by the probability to keep a weight.
    """
    padded = [torch.cat([each, each[:1].expand(-len(each) % DIM)]).view(-1, 1, 1, DIM) for each in (lower, upper)]
    value = torch.where(torch.arange(KEYS)[:, None] < share, padded[1], padded[0])
    query, key = torch.zeros_like(padded[0]), torch.zeros_like(value)
    tiles = TileBits(
        np.array([0, 1], dtype=np.int64),
        np.array([[0, KEYS, -1]], dtype=np.int64),
        np.zeros((1, 1, 1, BLOCK), dtype=np.uint64),
    )
    dropout = None
    if times != 1.0:
        rows, columns = torch.zeros(len(value), 1, 1, dtype=torch.int32), torch.zeros(KEYS, dtype=torch.int32)
        dropout = DropoutHashes(rows, columns, -(2**31), 1 / times)
    output, _ = FlashProblem(query, key, value, 1.0, tiles, None, None, dropout).forward()
    assert output.dtype == lower.dtype
    return output.view(-1)[: len(lower)]


@pytest.mark.parametrize("dim", [64, 37])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_is_widened_exactly(variant, dtype, dim):
    halves = all_patterns(dtype)
    padded = torch.cat([halves, halves[: -len(halves) % dim]]).view(-1, 1, 1, dim)
    zeros = torch.zeros_like(padded)
    wide, _ = attend_few_queries(zeros, zeros, padded, 1.0)  # whose output is float32
    assert wide.dtype == torch.float32
    found, expected = wide.reshape(-1), padded.float().view(-1)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("dim", [64, 37])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_pattern_comes_back(variant, dtype, dim):
    halves = all_patterns(dtype)
    padded = torch.cat([halves, halves[: -len(halves) % dim]]).view(-1, 1, 1, dim)
    zeros = torch.zeros_like(padded)
    output, _ = FlashProblem(zeros, zeros, padded, 1.0, one_tile(1)).forward()
    assert output.dtype == dtype
    assert torch.equal(output.isnan(), padded.isnan())
    expected = padded
    if dtype == torch.bfloat16 and library.current().pair_speed():  # the instruction takes subnormal numbers as 0
        expected = padded.where(padded.abs() >= torch.finfo(dtype).tiny, 0.0)
    assert torch.equal(output[~output.isnan()], expected[~padded.isnan()])
    sum_of_one = matmul_few_rows(torch.ones(1, 1, dtype=dtype), halves[:, None])
    assert torch.equal(sum_of_one[0].isnan(), halves.isnan())
    assert torch.equal(sum_of_one[0][~halves.isnan()], halves[~halves.isnan()])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_ties_are_rounded_to_even_and_the_rest_to_the_nearest(variant, dtype):
    """The midpoint of every two neighbours, and numbers next to it on both sides."""
    halves = all_patterns(dtype)
    steps = halves[halves.isfinite() & (halves.abs() < 0.01 * torch.finfo(torch.float32).max)].unique()
    lower, upper = steps[:-1], steps[1:]
    for share in (KEYS // 2 - 1, KEYS // 2, KEYS // 2 + 1):
        exact = (share * upper.double() + (KEYS - share) * lower.double()) / KEYS
        assert torch.equal(exact.float().double(), exact) or dtype == torch.bfloat16  # whose smallest are subnormal
        found, expected = mean_by_native_code(lower, upper, share), exact.float().to(dtype)
        normal = exact.abs() >= torch.finfo(torch.float32).tiny
        assert torch.equal(found[normal], expected[normal])
        assert (found[~normal].abs() <= torch.finfo(torch.float32).tiny).all()
    middle = mean_by_native_code(lower, upper, KEYS // 2).view(torch.int16)
    assert (middle % 2 == 0)[normal].all()


def test_float16_overflows_at_65520(variant):
    """A step below it lies 65,504, the largest number; the next would be 65,536."""
    largest, below, beyond = (torch.tensor([number], dtype=torch.float16) for number in (65504.0, 32752.0, 32768.0))
    for sign in (1, -1):
        for share, expected in ((0, 65504.0), (KEYS // 2 - 1, 65504.0), (KEYS // 2, math.inf), (KEYS, math.inf)):
            found = mean_by_native_code(sign * below, sign * beyond, share, times=2.0)
            assert found.item() == sign * expected
        assert mean_by_native_code(sign * largest, sign * largest, 0, times=2.0).item() == sign * math.inf
        assert mean_by_native_code(sign * largest, sign * largest, 0).item() == sign * 65504.0
