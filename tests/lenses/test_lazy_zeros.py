"""`lazy_zeros`: zeros whose memory is committed on the first write."""

import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import lenses, masks
from regard.lenses.weights import lazy_zeros


def taken() -> int:
    """The resident memory of this process in bytes."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_are_zeros_to_write_into(dtype):
    zeros = lazy_zeros((3, 5, 7), dtype)
    assert (zeros.shape, zeros.dtype, zeros.is_contiguous()) == ((3, 5, 7), dtype, True)
    assert (zeros == 0).all()
    zeros[1, 2] = 4
    assert zeros.sum() == 28
    assert lazy_zeros((3, 0, 7), dtype).shape == (3, 0, 7)


def test_the_memory_lives_as_long_as_a_view_of_it():
    row = lazy_zeros((64, 1024), torch.float32).fill_(3)[5]
    others = [torch.zeros(64, 1024) for _ in range(8)]
    assert (row == 3).all()
    del others


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's own account of memory")
def test_what_is_not_written_takes_none():
    before = taken()
    zeros = lazy_zeros((2**28,), torch.float32)  # 1 GiB
    assert taken() - before < 2**22
    zeros[: 2**20] = 1
    assert 2**21 < taken() - before < 2**23


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's own account of memory")
def test_weights_of_a_narrow_window_take_what_it_leaves():
    query, key, value = (torch.randn(1, 2, 8192, 8) for _ in range(3))
    shown = lenses.Weights()
    regard.observe(query, key, value, shown, mask=masks.window(8, 8))  # what is worked out once for the mask
    before = taken()
    weights = regard.observe(query, key, value, shown, mask=masks.window(8, 8))[shown]
    assert taken() - before < 2**27  # a quarter of them all
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 8192))
