"""Small pictures of all heads of an atlas, in the explorer's colours, as pixels and as PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .atlas import Atlas, AttentionMap

MOST_MAPS, MOST_HEADS = 32, 32
"""More maps or heads are left out, so that saved notebooks stay small."""
SIDE, GAP = 48, 6
PAPER = (255, 255, 255)
NO_PAIR = (228, 231, 234)
BROKEN = (214, 51, 132)
"""The colour, in RGB, of cells whose rows attend to NaN."""
COLOURS = np.array(
    [
        *((68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140)),
        *((40, 174, 128), (94, 201, 98), (173, 220, 48), (253, 231, 37)),
    ]
)
"""Equidistant points of viridis, interpolated linearly."""
SHADES = 62
"""Colours for weights; 62 make the file a third as large as 253."""


def preview_png(atlas: Atlas) -> bytes:
    """PNG of all heads, as `drawn_heads`. Of several translations of a sentence it shows the best.

    >>> import torch
    >>> preview_png(Atlas.from_weights([torch.full((2, 3, 3), 1 / 3)]))[1:4]
    b'PNG'
    """
    maps = [of for of in atlas.maps if of.hypothesis is None or of.hypothesis.rank == 0][:MOST_MAPS] or atlas.maps[:1]
    return png(drawn_heads(maps), _palette())


def heads_picture(of: AttentionMap) -> NDArray[np.uint8]:
    """The heads of one map side by side, as `drawn_heads`, in RGB: (height, width, 3)."""
    return _palette()[drawn_heads([of])]


def drawn_heads(maps: Sequence[AttentionMap]) -> NDArray[np.uint8]:
    """Palette indices of all heads, a row for each map: the coarsest level by its maxima.

    On a square root scale up to the head's largest weight.
    """
    across = min(max(of.heads for of in maps), MOST_HEADS)
    step = SIDE + GAP
    whole = np.zeros((len(maps) * step + GAP, across * step + GAP), dtype=np.uint8)
    for row, of in enumerate(maps):
        for head in range(min(of.heads, across)):
            top, left = GAP + row * step, GAP + head * step
            whole[top : top + SIDE, left : left + SIDE] = _drawn(of, head)
    return whole


def _palette() -> NDArray[np.uint8]:
    """RGB palette: background, masked, NaN, and the shades from 0 to the largest weight."""
    at = np.linspace(0, len(COLOURS) - 1, SHADES)
    shades = np.stack([np.interp(at, range(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)], axis=-1)
    return np.concatenate([[PAPER, NO_PAIR, BROKEN], shades.round()]).astype(np.uint8)


def _drawn(of: AttentionMap, head: int) -> NDArray[np.uint8]:
    """SIDE × SIDE palette indices of a head."""
    weights = np.asarray(of.pooled_pairs(head, len(of.levels) - 1, "max"), dtype=np.float64)
    broken = np.isinf(weights)
    weights[broken] = np.nan
    greatest = np.nanmax(weights, initial=0.0)
    part = np.sqrt(np.clip(weights / greatest, 0, 1)) if greatest > 0 else np.where(np.isnan(weights), weights, 0.0)
    shades = _shades(part)
    shades[broken] = 2
    rows, columns = (np.arange(SIDE) * size // SIDE for size in weights.shape)
    return shades[rows][:, columns]


def _shades(part: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Palette indices of numbers from 0 to 1; NaN as a masked pair."""
    return np.where(np.isnan(part), 1, 3 + (np.nan_to_num(part) * (SHADES - 1)).round()).astype(np.uint8)


def matrix_png(part: NDArray[np.float64]) -> bytes:
    """PNG of a matrix of numbers from 0 to 1, a pixel each, in the explorer's colours; NaN is transparent.

    >>> import numpy
    >>> matrix_png(numpy.array([[0.0, 1.0], [numpy.nan, 0.5]]))[1:4]
    b'PNG'
    """
    return png(_shades(part), _palette(), transparent=1)


def png(pixels: NDArray[np.uint8], palette: NDArray[np.uint8], *, transparent: int | None = None) -> bytes:
    """Encode (height, width) indices into a palette (colours, 3) as PNG (ISO/IEC 15948, section 5).

    transparent: the index that is no colour.
    """
    height, width = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)) + chunk(b"PLTE", palette.tobytes())
    if transparent is not None:
        header += chunk(b"tRNS", bytes([255] * transparent + [0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
