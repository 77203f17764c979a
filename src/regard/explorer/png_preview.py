"""All heads of an atlas in small, as a picture that needs no page: layers downwards, heads from left to right."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from .atlas import Atlas, AttentionMap

MOST_MAPS, MOST_HEADS = 32, 32
"""What is beyond is left out: the picture is for a saved notebook, which has to stay small."""
SIDE, GAP = 48, 6
PAPER = (255, 255, 255)
NO_PAIR = (228, 231, 234)
BROKEN = (214, 51, 132)
"""Of cells whose rows attend to NaN."""
COLOURS = np.array(
    [
        *((68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140)),
        *((40, 174, 128), (94, 201, 98), (173, 220, 48), (253, 231, 37)),
    ]
)
"""Points of viridis, at equal distances; between them colours are mixed."""
SHADES = 62
"""So few make the file a third as large as all that a screen can show."""


def preview_png(atlas: Atlas) -> bytes:
    """A PNG: of each head the greatest weights of the coarsest level, the square root of their part of the greatest.

    Of several translations of a sentence it shows the best.

    >>> import torch
    >>> preview_png(Atlas.from_weights([torch.full((2, 3, 3), 1 / 3)]))[1:4]
    b'PNG'
    """
    maps = [of for of in atlas.maps if of.hypothesis is None or of.hypothesis.rank == 0][:MOST_MAPS] or atlas.maps[:1]
    across = min(max(of.heads for of in maps), MOST_HEADS)
    step = SIDE + GAP
    whole = np.zeros((len(maps) * step + GAP, across * step + GAP), dtype=np.uint8)
    for row, of in enumerate(maps):
        for head in range(min(of.heads, across)):
            top, left = GAP + row * step, GAP + head * step
            whole[top : top + SIDE, left : left + SIDE] = _drawn(of, head)
    return png(whole, _palette())


def _palette() -> NDArray[np.uint8]:
    """Paper, no pair, the colour of NaN, and the shades from 0 to the greatest."""
    at = np.linspace(0, len(COLOURS) - 1, SHADES)
    shades = np.stack([np.interp(at, range(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)], axis=-1)
    return np.concatenate([[PAPER, NO_PAIR, BROKEN], shades.round()]).astype(np.uint8)


def _drawn(of: AttentionMap, head: int) -> NDArray[np.uint8]:
    """SIDE × SIDE pixels of a head, as numbers of the palette."""
    weights = np.asarray(of.pooled_pairs(head, len(of.levels) - 1, "max"), dtype=np.float64)
    broken = np.isinf(weights)
    weights[broken] = np.nan
    greatest = np.nanmax(weights, initial=0.0)
    part = np.sqrt(np.clip(weights / greatest, 0, 1)) if greatest > 0 else np.where(np.isnan(weights), weights, 0.0)
    shades = np.where(np.isnan(part), 1, 3 + (np.nan_to_num(part) * (SHADES - 1)).round()).astype(np.uint8)
    shades[broken] = 2
    rows, columns = (np.arange(SIDE) * size // SIDE for size in weights.shape)
    return shades[rows][:, columns]


def png(pixels: NDArray[np.uint8], palette: NDArray[np.uint8]) -> bytes:
    """(height, width) numbers of a palette (colours, 3) in the PNG format (ISO/IEC 15948, section 5)."""
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)) + chunk(b"PLTE", palette.tobytes())
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
