"""Numbers stored as codes of 8 or 4 bits: x' = scale · code + offset, with code = round((x - offset) / scale).

A code is a whole number from 0 on, or a float of 8 bits as torch has them, whose offset is 0. These formulas are the
reference: whatever reads codes computes with x'. Codes stand in words of 32 bits, as the code in C reads them
(packed_decode.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ConfigurationError, DtypeError, ShapeError, nearest
from .score_forms import at_least_float32

BITS = {"int8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8}
"""The codes that can be stored, and their bits."""
FLOATS = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
"""The types of those that are floats."""
BLOCK = 64
"""Tokens that stand together in memory; those of a block share parameters where these are by channel."""
WORD = 32
"""Bits of a word."""


@dataclass(frozen=True)
class Packing:
    """How keys, or values, are stored: codes, and what shares a scale and an offset, which are bfloat16.

    code: "int8" or "int4", whole numbers at even distances, or "float8_e4m3fn" or "float8_e5m2", whose distances grow
    with the number, so that small entries beside large ones keep digits of their own. by_channel: of keys, each dim of
    64 tokens shares them, for keys whose dims have ranges of their own, as those of projections with a bias; else each
    token of each head does. rotated: heads are multiplied by a Hadamard matrix first, so that a few large dims do not
    widen the range of all; queries are too, or outputs back.

    A token with NaN or infinity is read as NaN in all its dims; by channel, such an entry is read as an end of the
    range that the other tokens have.

    Raises:
        ConfigurationError: no such code; a rotation by channel, which would mix the channels.

    Source: Liu et al. 2024, KIVI (arXiv 2402.02750), for keys by channel; Ashkboos et al. 2024, QuaRot (arXiv
    2404.00456), for the rotation.

    >>> import torch
    >>> Packing("int4").read(torch.tensor([[[[0.0, 1.0, 2.0, 3.1]]]])).round(decimals=1)
    tensor([[[[0.0000, 1.0000, 2.1000, 3.1000]]]])
    """

    code: str = "int8"
    by_channel: bool = False
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.code not in BITS:
            raise ConfigurationError(
                f"keys and values cannot be stored as {self.code!r}, which nothing here reads; "
                f"{nearest(str(self.code), [*BITS])}. A cache of 16-bit numbers needs no packing: append tensors of "
                "that dtype"
            )
        if self.by_channel and self.rotated:
            raise ConfigurationError(
                "a packing is either by_channel or rotated: a rotation mixes the channels, whose ranges are then alike"
            )

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return BITS[self.code]

    @property
    def float_type(self) -> torch.dtype | None:
        """The type of codes that are floats; None of whole numbers."""
        return FLOATS.get(self.code)

    @property
    def largest(self) -> float:
        """The largest code."""
        return 2.0**self.bits - 1 if self.float_type is None else torch.finfo(self.float_type).max

    @property
    def per_word(self) -> int:
        """The codes of a word."""
        return WORD // self.bits

    def check(self, name: str, rows: Tensor) -> None:
        """Check that rows (B, H, T, D) can be stored.

        Raises:
            DtypeError: they are no floating-point numbers.
            ShapeError: a dim that does not fill words.
        """
        if not rows.is_floating_point():
            raise DtypeError(f"{name} are {rows.dtype}; a packed cache needs floating-point numbers, which it rounds")
        if not rows.shape[-1]:
            raise ShapeError(
                f"{name} have heads of dim 0, as those of latent attention, which are part of its keys: such a cache "
                "stores numbers as they are"
            )
        if rows.shape[-1] % self.per_word:
            raise ShapeError(
                f"{name} have heads of dim {rows.shape[-1]}; {self.code} codes stand in groups of {self.per_word}, "
                "which have to divide it: store these heads as they are, or in codes of another size"
            )

    def rotate(self, rows: Tensor) -> Tensor:
        """Rows (..., D) as they are stored, rotated or not; also what undoes it, as the matrix is its own inverse."""
        if not self.rotated:
            return rows
        matrix = hadamard(rows.shape[-1]).to(rows.device)
        return (at_least_float32(rows) @ matrix.to(at_least_float32(rows).dtype)).to(rows.dtype)

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of stored rows (B, H, T, D) as uint8, and their parameters: (B, H, T), or (B, H, D) of all T tokens."""
        rows = rows.float()
        axis, parameters = (-2 if self.by_channel else -1), self._parameters(rows)
        scale, offset = (each.unsqueeze(axis) for each in scale_and_offset(parameters))
        numbers = ((rows - offset) / scale).nan_to_num_(0.0)
        if self.float_type is not None:
            numbers = numbers.clamp_(-self.largest, self.largest)
            return numbers.to(self.float_type).view(torch.uint8), parameters
        return numbers.round_().clamp_(0, self.largest).to(torch.uint8), parameters

    def numbers(self, codes: Tensor) -> Tensor:
        """The numbers that codes (uint8) are, before scale and offset."""
        return codes if self.float_type is None else codes.view(self.float_type).float()

    def unpack(self, codes: Tensor, parameters: Tensor) -> Tensor:
        """What codes stand for: scale · code + offset, float32; shapes as `pack` has them."""
        axis = -2 if self.by_channel else -1
        scale, offset = (each.unsqueeze(axis) for each in scale_and_offset(parameters))
        return self.numbers(codes) * scale + offset

    def read(self, rows: Tensor) -> Tensor:
        """What is read of rows (B, H, T, D) that are stored: themselves, but for the error of the codes."""
        stored = self.rotate(rows.float())
        return self.rotate(self.unpack(*self.pack(stored))).to(rows.dtype)

    def _parameters(self, rows: Tensor) -> Tensor:
        """Words of the smallest scale and the largest offset in bfloat16 with which the codes reach all rows."""
        axis = -2 if self.by_channel else -1
        low, high = rows, rows
        if self.by_channel:
            finite = rows.isfinite()
            low, high = rows.masked_fill(~finite, float("inf")), rows.masked_fill(~finite, float("-inf"))
        low, high = low.amin(axis), high.amax(axis)
        if self.by_channel:  # without a finite entry
            low, high = low.masked_fill(low > high, 0.0), high.masked_fill(low > high, 0.0)
        if self.float_type is None:
            offset = _downwards(low)
            reach = high - offset
        else:
            offset, reach = torch.zeros_like(low), torch.maximum(-low, high)
        scale = -_downwards(-reach / self.largest)
        known = scale.isfinite() & offset.isfinite()
        scale, offset = (each.masked_fill(~known, float("nan")) for each in (scale, offset))
        return scale.view(torch.int32) | (offset.view(torch.int32) >> 16 & 0xFFFF)


def scale_and_offset(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """The two numbers of words of parameters, float32: the scale in the upper 16 bits, the offset in the lower."""
    return (parameters & -0x10000).view(torch.float32), (parameters << 16).view(torch.float32)


def to_words(codes: Tensor, bits: int) -> Tensor:
    """Words of codes (..., 32 / bits): code k from bit 8 · (k mod 4) + 4 · (k div 4) on."""
    return (codes.to(torch.int32) << _shifts(bits, codes.device)).sum(-1, dtype=torch.int32)


def from_words(words: Tensor, bits: int) -> Tensor:
    """The codes of words (...), as uint8 (..., 32 / bits)."""
    return (words.unsqueeze(-1) >> _shifts(bits, words.device) & (2**bits - 1)).to(torch.uint8)


@lru_cache(maxsize=64)
def hadamard(dim: int) -> Tensor:
    """An orthogonal, symmetric matrix (dim, dim) of numbers ±1/√b in blocks of b, the largest power of two in dim.

    Source: Sylvester 1867.

    >>> hadamard(2)
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]])
    """
    block = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.block_diag(*[matrix * block**-0.5] * (dim // max(block, 1))).float()


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Where each code of a word begins."""
    number = torch.arange(WORD // bits, dtype=torch.int32, device=device)
    return 8 * (number % 4) + 4 * (number // 4)


def _downwards(numbers: Tensor) -> Tensor:
    """The largest bfloat16 numbers that are not above float32 ones; still float32."""
    words = numbers.contiguous().view(torch.int32)
    towards_zero = words & -0x10000
    beyond = (numbers < 0) & (towards_zero != words)
    return (towards_zero + (beyond.to(torch.int32) << 16)).view(torch.float32)
