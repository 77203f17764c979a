"""Flash attention's online softmax (Milakov and Gimelshein 2018, Dao et al. 2022): one tile of keys after the other."""

import math

import torch
from torch import Tensor


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, width: int) -> Tensor:
    """The context of each query, with scores of `width` keys in memory at a time.

    Shapes: query (..., M, d), key (..., N, d), value (..., N, Dv); returns (..., M, Dv).
    """
    peak = query.new_full((*query.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(peak)
    summed = torch.zeros_like(peak)
    for start in range(0, key.shape[-2], width):
        keys, values = key[..., start : start + width, :], value[..., start : start + width, :]
        scores = query @ keys.mT / math.sqrt(query.shape[-1])
        higher = torch.maximum(peak, scores.amax(-1, keepdim=True))  # hole: the largest score so far, (..., M, 1)
        shrink = (peak - higher).exp()  # hole: what older sums are multiplied by, (..., M, 1)
        parts = (scores - higher).exp()  # hole: the exponentials of this tile, (..., M, width)
        total = shrink * total + parts.sum(-1, keepdim=True)  # hole: the sum of all exponentials so far
        summed = shrink * summed + parts @ values  # hole: the sum of values times exponentials so far
        peak = higher
    return summed / total  # hole: the context
