"""What earlier calls left in memory that is allocated anew changes nothing: it is NaN here."""

import ctypes
import sys

import pytest
import torch

import regard
from regard import biases, masks, native

pytestmark = [
    pytest.mark.skipif(native.why_not() is not None, reason="there is no native code"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is filled by way of glibc"),
]
SIZES = [number << power for number in (2, 3) for power in range(5, 21)]


def fill_freed_memory() -> None:
    """Allocate and free blocks of many sizes, every byte of them 255: floats that are NaN."""
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    keep, map_threshold = 1 << 30, -3
    libc.mallopt(map_threshold, keep)  # large blocks too are kept for later ones
    blocks = []
    for size in SIZES:
        for _ in range(max(2, min(200, (8 << 20) // size))):
            blocks.append(libc.malloc(size))
            ctypes.memset(blocks[-1], 0xFF, size)
    for block in blocks:
        libc.free(block)


BIASES = {
    "none": lambda: None,
    "by distance": lambda: biases.alibi(4),
    "forget gates": lambda: biases.forget_gates(torch.rand(2, 4, 53).log()),
    "tables of content": lambda: biases.deberta(learned(4, 16, 8), learned(4, 16, 8), buckets=8, max_distance=16),
    "vectors of content": lambda: biases.shaw(learned(1, 17, 8), before=8, after=8),
}


def learned(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["all pairs", "causal"])
@pytest.mark.parametrize("kernel", ["cpu_flash", "short", "tiled"])
@pytest.mark.parametrize("bias", BIASES)
def test_stale_memory_changes_nothing(bias, kernel, mask):
    """53 rows and keys: the last groups of a tile have rows, and the last vectors columns, that are not there."""
    added, inputs = BIASES[bias](), [learned(2, 4, 53, 8) for _ in range(3)]
    tensors = [*inputs, *([] if added is None else [one for one in added.parameters() if one.requires_grad])]
    upstream = torch.randn(2, 4, 53, 8)

    def results(name: str) -> list[torch.Tensor]:
        output = regard.attention(*inputs, mask=mask, bias=added, kernel=name)
        fill_freed_memory()
        return [output, *torch.autograd.grad(output, tensors, upstream)]

    expected = results("reference")
    fill_freed_memory()
    for found, right in zip(results(kernel), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
