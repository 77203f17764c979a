"""Graphics cards by their data sheets, and the time that attention takes on them.

The rates of a card are those of its data sheet. How much of them attention reaches was measured once, on an H200, and
is taken for the other cards too; what was measured elsewhere, or estimated, says so beside its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Card:
    """A graphics card by its data sheet: GB of memory, TB/s it reads, TFLOP/s of bfloat16 and of float32.

    The products are dense, of tensor cores in bfloat16 and float16, and of ordinary cores in float32.
    """

    name: str
    memory: float
    bandwidth: float
    half: float
    single: float

    def flops(self, dtype: torch.dtype) -> float:
        """Products a second at the most, in floating-point operations, by the data sheet."""
        return 1e12 * (self.half if dtype.itemsize == 2 else self.single / (1 if dtype.itemsize == 4 else 2))


CARDS = {
    "a10": Card("NVIDIA A10", 24, 0.600, 125, 31.2),
    "a100": Card("NVIDIA A100 SXM", 80, 2.039, 312, 19.5),
    "b200": Card("NVIDIA B200", 180, 7.7, 2250, 75),
    "h100": Card("NVIDIA H100 SXM", 80, 3.35, 989, 67),
    "h100-pcie": Card("NVIDIA H100 PCIe", 80, 2.0, 756, 51),
    "h200": Card("NVIDIA H200 SXM", 141, 4.8, 989, 67),
    "l4": Card("NVIDIA L4", 24, 0.300, 121, 30.3),
    "l40s": Card("NVIDIA L40S", 48, 0.864, 362, 91.6),
    "rtx4090": Card("NVIDIA GeForce RTX 4090", 24, 1.008, 165, 82.6),
}
"""Cards by the name that `advise(gpu=...)` takes. float64 is taken to have half the rate of float32."""
ASSUMED = "h200"
"""The card of `device="cuda"` without a name, where no rates were measured."""

READ_SHARE = 0.95
"""Of the bandwidth: 1 GiB of keys and values for 16 single queries in 0.249 ms (torch's kernel, docs/gpu.md)."""
FORWARD_SHARE = 0.60
"""Of the products' rate, forward: causal (8, 16, 4096, 128) in bfloat16 in 0.975 ms (torch's kernel, docs/gpu.md)."""
BACKWARD_SHARE = 0.54
"""The same backward, of five products for two: 3.66 ms together with forward."""
SPARSE_SHARE = 0.31
"""Forward where a mask leaves out blocks: a window of 512 of 16,384 tokens in 0.292 ms (FlexAttention, docs/gpu.md)."""
SPARSE_BACKWARD_SHARE = 0.28
"""The same backward: 1.063 ms together with forward."""
DELTA_SHARE = 0.035
"""The gated delta rule's: 0.316 ms for 8,192 tokens of 16 heads of 128 (flash-linear-attention 0.5.1 on an H200, by the
benchmark of FlashQLA)."""
ADDITIVE_RATE = 1.25e-2
"""Features of additive scores a second, of the rate of products in float32: 8 × 1,024 × 1,024 of 128 in 1.29 ms (the
compiled formula, docs/gpu.md)."""
SINGLE_SHARE = 0.80
"""Of the products' rate in float32: estimated."""
TILE = 128
"""Rows and columns of a block, of which those on the edge of a mask are computed whole."""
LAUNCH = 1.7e-5
"""Seconds of a call beside its work: one query over 64 MiB of keys and values in 33 µs (docs/gpu.md)."""


def card_named(name: str) -> Card:
    """The card of that name.

    Raises:
        ConfigurationError: a name that is not in `CARDS`.
    """
    if (key := name.lower().replace("_", "-")) not in CARDS:
        raise ConfigurationError(
            f"there is no card {name!r}; {nearest(key, tuple(CARDS))}. Of another one, `regard bench --calibrate "
            "--device cuda` measures the rates where it is; then device='cuda' without gpu"
        )
    return CARDS[key]


@dataclass(frozen=True)
class CardWork:
    """Work of one layer: floating-point operations forward, bytes read and written, and the share that is reached.

    backward: floating-point operations of the backward pass, 0 without one. edge: how many times more pairs are
    computed than the mask leaves, for blocks on its edge. sparse: whether the mask leaves out blocks of pairs.
    """

    flops: float
    bytes: float
    backward: float = 0.0
    edge: float = 1.0
    sparse: bool = False

    def seconds(self, card: Card, dtype: torch.dtype) -> float:
        """Predicted seconds on a card: the longer of products and reading, and of the launches."""
        forward, backward = (SPARSE_SHARE, SPARSE_BACKWARD_SHARE) if self.sparse else (FORWARD_SHARE, BACKWARD_SHARE)
        if dtype.itemsize > 2:
            forward = backward = SINGLE_SHARE * (forward / FORWARD_SHARE)
        products = self.edge * (self.flops / forward + self.backward / backward) / card.flops(dtype)
        reading = self.bytes / (READ_SHARE * 1e12 * card.bandwidth)
        return max(products, reading) + LAUNCH * (1 + bool(self.backward))
