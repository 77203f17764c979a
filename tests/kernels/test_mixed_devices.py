"""Inputs on one device, and what a mask, a bias or a lens reads on another: an error that names both, and the mend.

There is one device on most machines: fake tensors are on a GPU that is not there, and `meta` is a second device.
"""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard import biases, masks
from regard.biases.gaussian import Gaussian
from regard.errors import DeviceError

KERNELS = (None, "reference", "tiled", "sdpa")
INPUTS = torch.zeros(3, 2, 4, 8, 16).unbind()
NUMBERS = torch.zeros(8, device="meta")
TABLE = torch.zeros(4, 32, device="meta")
KEPT = torch.ones(8, dtype=torch.bool, device="meta")
TO_CPU = r"but query, key and value are on cpu: move (it|them) with .to\('cpu'\)"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": NUMBERS}, r"bias tensor\(<float32 \(1, 8\)>\) is on meta, "),
        ({"bias": biases.relative(TABLE)}, r"bias relative\(.*\) is on meta, "),
        ({"bias": Gaussian(NUMBERS.expand(2, 4, 8), torch.ones(()))}, r"gaussian\(.*\) reads tensors on meta, "),
        ({"mask": masks.from_mod(lambda b, h, q, k: KEPT[k])}, r"mask from_mod\(<lambda>\) is on meta, "),
        (
            {"mask": masks.from_mod(lambda b, h, q, k: KEPT[k] & (q >= k))},
            r"from_mod\(<lambda>\) reads tensors on meta, ",
        ),
    ],
    ids=["tensor", "table", "gaussian", "mask", "mask of both"],
)
def test_what_is_read_on_another_device(kernel: str | None, options: dict, message: str):
    with pytest.raises(DeviceError, match=message + TO_CPU):
        regard.attention(*INPUTS, kernel=kernel, **options)


def test_a_bias_of_a_function():
    shift = torch.zeros(8)
    bias = biases.from_mod(lambda score, b, h, q, k: score + shift[k])
    with pytest.raises(DeviceError, match=r"from_mod\(.*\) reads tensors on cpu, but query, key and value are on meta"):
        bias.evaluate(regard.core.grid.Grid.from_lengths(8, 8, device=torch.device("meta")))


def test_numbers_without_axes_go_with_any_device():
    bias = biases.gaussian(1.0, 2.0)
    assert bias.evaluate(regard.core.grid.Grid.from_lengths(8, 8, device=torch.device("meta"))).is_meta


def test_other_failures_keep_their_error():
    shift = torch.zeros(8, device="meta")

    def fails(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"{shift.ndim} is no mask")

    with pytest.raises(regard.errors.MaskError, match="1 is no mask"):
        regard.attention(*INPUTS, mask=masks.from_mod(fails))


TO_GPU = r"move it with .to\('cuda:0'\)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda on, off: regard.attention(on, off, on),
            "query is on cuda:0, key on cpu, value on cuda:0: they need one device",
        ),
        (lambda on, off: regard.attention(on, on, on, sinks=off[0, :, 0, 0]), "sinks is on cpu, .*" + TO_GPU),
        (
            lambda on, off: regard.attention(on, on, on, key_positions=torch.arange(8)),
            "key_positions is on cpu, .*" + TO_GPU,
        ),
        (lambda on, off: regard.attention(on, on, on, bias=off[0, 0] @ off[0, 0].mT), "bias .* is on cpu, .*" + TO_GPU),
        (
            lambda on, off: regard.attention(on, on, on, score=regard.scores.Additive(16, 16, 16)),
            r"query is on cuda:0, but the parameters of Additive\(.*\) are on cpu",
        ),
    ],
    ids=["key", "sinks", "positions", "bias", "score"],
)
def test_tensors_on_a_gpu_and_on_the_cpu(call: Callable, message: str):
    with FakeTensorMode(), pytest.raises(DeviceError, match=message):
        call(torch.zeros(2, 4, 8, 16, device="cuda"), torch.zeros(2, 4, 8, 16))
