"""Matrices in panels of columns, as panels.h has them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from . import library

PANEL_COLUMNS = 32
"""Columns of a panel of a packed matrix, as in panels.h."""


def pack(matrix: Tensor) -> Tensor:
    """A matrix (terms, columns) as (panels, terms, PANEL_COLUMNS), with zeros in the columns beyond.

    >>> pack(torch.ones(3, 40)).shape
    torch.Size([2, 3, 32])
    """
    matrix, (terms, columns) = matrix.detach(), matrix.shape
    if matrix.stride(0) == 1 and library.supports(matrix) and matrix.dtype is torch.float32:
        packed = matrix.new_empty(-(-columns // PANEL_COLUMNS), terms, PANEL_COLUMNS)
        stride = matrix.stride(1)
        library.current().pack_panels(matrix.data_ptr(), stride, terms, columns, packed.data_ptr())
        return packed
    padded = functional.pad(matrix, (0, -columns % PANEL_COLUMNS))
    return padded.view(terms, -1, PANEL_COLUMNS).transpose(0, 1).contiguous()
