"""Matrices that many rows are multiplied by, packed in panels of columns: floats, as panels.h has them, or bytes."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from . import library

PANEL_COLUMNS = 32
"""Columns of a panel of a packed matrix, as in panels.h."""
TERMS_OF_WORD = 4
"""Terms of a column in one word of a matrix of bytes, as in byte_panels.h."""
LARGEST_BYTE = 127
"""The size of the largest whole number of a matrix of bytes, as in byte_panels.h."""


class PackedMatrixStruct(ctypes.Structure):
    """The structure `packed_matrix` of packed_matrix.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("panels", "scales", "bias")),
        *((name, c_int64) for name in ("terms", "columns")),
    )


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """The weight (columns, terms) of a linear layer and its bias (columns,) or None, as C reads them."""

    panels: Tensor
    scales: Tensor | None
    bias: Tensor | None
    terms: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, *, in_bytes: bool = False) -> PackedMatrix:
        """Pack a weight, float32 on the CPU; in bytes: each column rounded to 255 whole numbers times a scale."""
        columns, terms = weight.shape
        panels, scales = _pack_bytes(weight) if in_bytes else (pack(weight.T), None)
        return cls(panels, scales, None if bias is None else bias.detach().contiguous(), terms, columns)

    def struct(self) -> PackedMatrixStruct:
        """The structure that points into these tensors."""
        addresses = (None if one is None else one.data_ptr() for one in (self.panels, self.scales, self.bias))
        return PackedMatrixStruct(*addresses, self.terms, self.columns)


def pack(matrix: Tensor) -> Tensor:
    """A matrix (terms, columns) as (panels, terms, PANEL_COLUMNS), with zeros in the columns beyond.

    >>> pack(torch.ones(3, 40)).shape
    torch.Size([2, 3, 32])
    """
    matrix, (terms, columns) = matrix.detach(), matrix.shape
    if matrix.stride(0) == 1 and library.supports(matrix) and matrix.dtype is torch.float32:
        packed = matrix.new_empty(_panel_count(columns), terms, PANEL_COLUMNS)
        stride = matrix.stride(1)
        library.current().pack_panels(matrix.data_ptr(), stride, terms, columns, packed.data_ptr())
        return packed
    padded = functional.pad(matrix, (0, -columns % PANEL_COLUMNS))
    return padded.view(terms, -1, PANEL_COLUMNS).transpose(0, 1).contiguous()


def bytes_are_faster() -> bool:
    """Whether native code multiplies bytes in less time than floats, by an instruction of the processor."""
    return library.available() and bool(library.current().multiplies_bytes())


def rounded_to_bytes(weight: Tensor) -> Tensor:
    """Each row of a weight (columns, terms) rounded to whole numbers of -127 to 127 times its largest size / 127.

    >>> rounded_to_bytes(torch.tensor([[127.0, 1.2, -0.4]]))
    tensor([[127.,   1.,   0.]])
    """
    scales = weight.abs().amax(1, keepdim=True) / LARGEST_BYTE
    return (weight / scales.masked_fill(scales == 0, 1.0)).round() * scales + 0.0


def _pack_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight (columns, terms) in bytes, and the scale of each column."""
    weight, (columns, terms) = weight.detach().contiguous(), weight.shape
    panels = torch.empty(_panel_count(columns), -(-terms // TERMS_OF_WORD), PANEL_COLUMNS, dtype=torch.int32)
    scales = weight.new_empty(_panel_count(columns) * PANEL_COLUMNS)
    library.current().pack_bytes(weight.data_ptr(), terms, terms, columns, panels.data_ptr(), scales.data_ptr())
    return panels, scales


def _panel_count(columns: int) -> int:
    return -(-columns // PANEL_COLUMNS)
