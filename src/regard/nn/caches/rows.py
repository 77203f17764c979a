"""Rows of a batch, for what is asked for some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from ...transforms import transformed


def check_rows(rows: object, batch: int) -> None:
    """Rows (count,) of a batch, whole numbers in 0..batch-1, or bool (batch,). Only on a CPU are they looked at.

    torch alone would count a row below 0 from the end, and a wrong parent in a search would show in no message.

    Raises:
        ShapeError, DtypeError: they are not that.

    >>> check_rows(torch.tensor([1, 1, 0]), batch=2)
    """
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32, torch.bool):
        has = rows.dtype if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise DtypeError(f"rows need a tensor of whole numbers, torch.int64 for instance, or of bool; this is {has}")
    if rows.ndim != 1 or (rows.dtype == torch.bool and len(rows) != batch):
        needs = f"({batch},), as the batch has the size {batch}" if rows.dtype == torch.bool else "(count,)"
        raise ShapeError(f"rows have the shape {tuple(rows.shape)}; {rows.dtype} rows need {needs}")
    if rows.dtype == torch.bool or not rows.is_cpu or not len(rows) or transformed():
        return
    least, most = (int(end) for end in rows.aminmax())
    if least < 0 or most >= batch:
        raise ShapeError(
            f"rows are in {least}..{most}, but the batch has the size {batch}: they need to be in 0..{batch - 1}"
        )
