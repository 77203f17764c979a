"""Rows of a tensor that torch's kernels read and write as one piece each."""

from __future__ import annotations

from torch import Tensor


def separate_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied unless the numbers of a row (its last axis) are neighbours and rows are not one number apart.

    Rows one number apart are the windows of `signal.unfold(-1, dim, 1)`. Torch makes a result like them with the axes
    of equal strides in the order of their sizes, and its flash kernel for CPUs writes such results as if the last came
    last.

    >>> import torch
    >>> windows = torch.arange(6.0).unfold(0, 4, 1)  # (3, 4)
    >>> windows.stride(), torch.empty_like(windows).stride(), separate_rows(windows).stride()
    ((1, 1), (1, 3), (4, 1))
    """
    *others, last = tensor.stride()
    return tensor if last == 1 and 1 not in others else tensor.contiguous()
