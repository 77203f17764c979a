"""Tiles, warps and stages of the flash kernels, by architecture, kernel, head dim and dtype.

They were chosen by what the compiler says: no registers are spilled to memory, and shared memory suffices. How fast
they are is unmeasured. Of 16 bits, tiles of the forward pass are as high as they can be, as what a program reads for
each product falls with their height. Float32 is multiplied without tensor cores, and whole rows of operands are in
registers: many warps share a small tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from . import jit_runtime


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """A tile of rows × columns for each step of a program, its warps, and the stages of loads ahead of products."""

    rows: int
    columns: int
    warps: int
    stages: int


WIDE_DIM = 256
"""Up to this head dim rows are one tile, padded to a power of two; wider ones are two, as the padding would be read."""
INTERPRETED = LaunchSettings(64, 64, 4, 1)
"""The interpreter takes as long for a small tile as for a large one."""

Table: TypeAlias = dict[str, dict[int, tuple[int, int, int, int]]]
"""Of each kernel and each head dim: rows, columns, warps, stages.

Kernels are "forward", "query" and "key"; "thresholds" and "threshold terms" of weights above a threshold; and "key of
powers", of entmax with any α, where its tile is not that of "key".
"""

# Scores that are products alone, with a mask or without.
PLAIN: dict[int, Table] = {
    80: {
        "forward": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1), 512: (32, 16, 8, 1)},
        "query": {64: (64, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
        "key": {64: (32, 64, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
    },
    90: {
        "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2), 512: (32, 16, 8, 2)},
        "query": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
        "key": {64: (64, 64, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 1)},
    },
    100: {
        "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2), 512: (32, 16, 8, 2)},
        "query": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
        "key": {64: (64, 64, 8, 2), 128: (64, 64, 8, 1), 256: (32, 32, 8, 1)},
    },
}
# With a softcap, a bias, dropout or a normalizer.
WITH_TERMS: dict[int, Table] = {
    80: {
        "forward": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1), 512: (32, 16, 8, 1)},
        "query": {64: (64, 32, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1)},
        "key": {64: (32, 32, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1)},
        "thresholds": {64: (128, 64, 8, 2), 128: (64, 32, 8, 2), 256: (64, 64, 8, 1)},
        "threshold terms": {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 64, 8, 1)},
    },
    90: {
        "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2), 512: (32, 16, 8, 2)},
        "query": {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
        "key": {64: (32, 64, 8, 2), 128: (32, 32, 8, 2), 256: (16, 32, 8, 1)},
        "thresholds": {64: (128, 64, 8, 3), 128: (64, 64, 8, 3), 256: (64, 64, 8, 2)},
        "threshold terms": {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
    },
    100: {
        "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 64, 8, 2), 512: (32, 16, 8, 2)},
        "query": {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
        "key": {64: (32, 64, 8, 2), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1)},
        "key of powers": {64: (32, 64, 8, 1), 128: (32, 32, 8, 2), 256: (32, 32, 8, 1)},
        "thresholds": {64: (64, 64, 4, 3), 128: (64, 64, 8, 3), 256: (64, 64, 8, 2)},
        "threshold terms": {64: (64, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 2)},
    },
}
# Any architecture and any scores.
FLOAT32: Table = {
    "forward": {64: (32, 32, 8, 2), 128: (32, 32, 16, 1), 256: (32, 32, 16, 1), 512: (16, 16, 16, 1)},
    "query": {64: (32, 32, 8, 2), 128: (32, 32, 16, 1), 256: (16, 32, 16, 1)},
    "key": {64: (32, 32, 8, 2), 128: (32, 32, 16, 1), 256: (16, 16, 8, 1)},
    "thresholds": {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (32, 32, 16, 1)},
    "threshold terms": {64: (32, 32, 8, 2), 128: (32, 32, 16, 1), 256: (16, 32, 16, 1)},
}


# Of rows that share a list of keys, and of 16 bits. The rows are the most of a program; it has 16 for tensor cores.
OF_LISTS: Table = {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 8, 2), 256: (64, 32, 8, 2)},
    "backward": {64: (64, 32, 8, 2), 128: (64, 16, 8, 2), 256: (32, 32, 8, 1)},
}


def settings_of_lists(kernel: str, rows: int, dim: int, dtype: torch.dtype) -> LaunchSettings:
    """The settings of a kernel over listed keys, "forward" or "backward"; rows: that share a list."""
    if jit_runtime.INTERPRETED:
        most, columns, warps, stages = 64, 64, 4, 1
    elif dtype.itemsize == 4:
        most, columns, warps, stages = 16, 32, 8, 1
    else:
        most, columns, warps, stages = next(
            OF_LISTS[kernel][known] for known in sorted(OF_LISTS[kernel]) if known >= dim
        )
    return LaunchSettings(min(max(16, 1 << max(rows - 1, 0).bit_length()), most), columns, warps, stages)


def padded_dims(dim: int, value_dim: int) -> dict[str, int]:
    """The head dims, and the powers of two from 16 on that they are padded to, as kernels name them."""
    padded, value_padded = (max(16, 1 << (each - 1).bit_length()) for each in (dim, value_dim))
    return {"D": dim, "DV": value_dim, "BD": padded, "BDV": value_padded}


def split_dims(dim: int, value_dim: int) -> dict[str, int]:
    """As `padded_dims`; queries and keys above `WIDE_DIM` in two tiles, the second of REST columns, else 0.

    >>> split_dims(576, 512)
    {'D': 576, 'DV': 512, 'BD': 512, 'BDV': 512, 'REST': 64}
    """
    dims = padded_dims(dim, value_dim) | {"REST": 0}
    if dim > WIDE_DIM and dims["BD"] > dim:
        dims["BD"] //= 2
        dims["REST"] = padded_dims(dim - dims["BD"], value_dim)["BD"]
    return dims


def launch_settings(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, *, terms: bool) -> LaunchSettings:
    """The settings for a kernel of the table.

    dim: the larger of the head dims. terms: whether there is a softcap, a bias, dropout or a normalizer.
    """
    if jit_runtime.INTERPRETED:
        return INTERPRETED
    return settings_of(architecture(device), kernel, dim, wide=dtype.itemsize == 4, terms=terms)


@cache
def architecture(device: torch.device) -> int:
    """The architecture whose row of the table a card takes.

    Cards for desktops (8.6, 8.9, 12.0) have 99 KiB of shared memory for a program: the row of 80 needs no more.
    """
    return {9: 90, 10: 100}.get(torch.cuda.get_device_capability(device)[0], 80)


@cache
def settings_of(arch: int, kernel: str, dim: int, *, wide: bool, terms: bool) -> LaunchSettings:
    """A row of the table, that of the next larger dim that there is; wide: of float32."""
    table = FLOAT32 if wide else (WITH_TERMS if terms else PLAIN)[arch]
    tiles = table[kernel if kernel in table else kernel.removesuffix(" of powers")]
    return LaunchSettings(*next(tiles[known] for known in sorted(tiles) if known >= dim))
