"""Grouped-query attention (Ainslie et al. 2023): neighbouring query heads share a head of keys and values."""

import math

from torch import Tensor


def grouped_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context of each query head.

    Shapes: query (..., H, M, d), key (..., Hk, N, d), value (..., Hk, N, Dv), H a multiple of Hk; returns
    (..., H, M, Dv). The first H / Hk query heads read the first head of keys, the next the second, and so on.
    """
    group = query.shape[-3] // key.shape[-3]
    key = key.repeat_interleave(group, dim=-3)  # hole: the keys of each query head, (..., H, N, d)
    value = value.repeat_interleave(group, dim=-3)  # hole: the values of each query head, (..., H, N, Dv)
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.softmax(dim=-1) @ value
