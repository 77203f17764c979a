"""What calibration times on a card computes attention."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("triton")

from regard.backends.triton.timed_launches import SCALE, TimedFlashInTriton

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_what_is_timed_is_attention():
    timed: Any = TimedFlashInTriton()
    query, key, value = torch.randn(3, 1, 2, 37, 16)
    output, _ = timed.forward(query, key, value)()
    expected = scaled_dot_product_attention(query, key, value, scale=SCALE)
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=1e-5)
    leaves = q, k, v = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    scaled_dot_product_attention(q, k, v, scale=SCALE).backward(output)
    found = timed.backward(query, key, value)()
    for has, leaf in zip((found.query, found.key, found.value), leaves, strict=True):
        torch.testing.assert_close(has, leaf.grad, atol=1e-5, rtol=1e-4)
    row, _ = timed.stream(key, value)()
    ones = torch.ones(1, 2, 1, 16)
    torch.testing.assert_close(row, scaled_dot_product_attention(ones, key, value, scale=SCALE), atol=2e-6, rtol=1e-5)
    assert timed.dtypes("cpu"), "the interpreter's device is the CPU"
