"""MXFP4, in which gpt-oss's experts are stored: blocks of 32 numbers of 4 bits, and an exponent for each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

MXFP4 = ("_blocks", "_scales")
"""Ends of the names of the two tensors that hold one parameter."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1: a sign bit, two of exponent, one of mantissa."""
BIAS = 127
"""Of the exponents of blocks: E8M0."""


def unpacked(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Unpack MXFP4 numbers to another dtype: (experts, in, out), the layout of `MixtureOfExperts`.

    Shapes: blocks (experts, out, in/32, 16) and scales (experts, out, in/32), both of bytes.

    A byte holds two numbers, the first in its lower half. Each number is exact in float32, and in bfloat16.

    Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1.

    >>> unpacked(torch.tensor([[[[0x21, 0xF0]]]], dtype=torch.uint8), torch.tensor([[[128]]], dtype=torch.uint8))
    tensor([[[  1.],
             [  2.],
             [  0.],
             [-12.]]])
    """
    experts, out, groups, half = blocks.shape
    result = torch.empty(experts, groups * half * 2, out, dtype=dtype)
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)])
    for expert in range(experts):  # one at a time: what lies between takes many times the memory of the result
        pairs = torch.stack([blocks[expert] & 0x0F, blocks[expert] >> 4], dim=-1).flatten(-2)
        numbers = torch.ldexp(values[pairs.int()], (scales[expert].int() - BIAS).unsqueeze(-1))
        result[expert] = numbers.flatten(-2).T
    return result


def packed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of stored tensors, with the unpacked shape for each packed parameter.

    >>> packed_shapes({"down_blocks": (2, 5, 3, 16), "down_scales": (2, 5, 3), "bias": (5,)})
    {'down': (2, 96, 5), 'bias': (5,)}
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        base = name.removesuffix(MXFP4[0])
        if base != name and shapes.get(base + MXFP4[1]) == shape[:-1] and len(shape) == 4:
            found[base] = (shape[0], shape[2] * shape[3] * 2, shape[1])
        elif not (name.endswith(MXFP4[1]) and name.removesuffix(MXFP4[1]) + MXFP4[0] in shapes):
            found[name] = shape
    return found
