"""ONNX (Apache-2.0): a hand-checkable window of its Attention operator, one key before and two after."""

import pytest
import torch

import regard
from regard import masks

OUTPUT = [1.0, 1.5, 2.5, 3.0, 3.5]


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_a_window_of_equal_weights(kernel):
    zeros, value = torch.zeros(5, 3), torch.arange(5.0)[:, None]
    ahead = torch.arange(5) - torch.arange(5)[:, None]
    inside = (ahead >= -1) & (ahead <= 2)
    by_mask = regard.attention(zeros, zeros, value, mask=masks.where(keep=inside), kernel=kernel)
    outside = torch.zeros(5, 5).masked_fill(~inside, -torch.inf)
    by_bias = regard.attention(zeros, zeros, value, bias=outside, kernel=kernel)
    for output in (by_mask, by_bias):
        torch.testing.assert_close(output.flatten(), torch.tensor(OUTPUT))
