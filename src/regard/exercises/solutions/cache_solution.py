"""A step of decoding with a cache: the keys and values of earlier words are kept, and not computed again."""

import math

import torch
from torch import Tensor

Cache = tuple[Tensor, Tensor]
"""Keys (..., t, d) and values (..., t, Dv) of the words so far."""


def decode_step(query: Tensor, key: Tensor, value: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
    """The context of the new word, and the cache that has it.

    Shapes: query and key (..., 1, d), value (..., 1, Dv); returns (..., 1, Dv). cache: None before the first word.
    """
    if cache is not None:
        key = torch.cat([cache[0], key], dim=-2)  # hole: the keys of all words so far
        value = torch.cat([cache[1], value], dim=-2)  # hole: the values of all words so far
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    context = scores.softmax(dim=-1) @ value  # hole: the context of the new word
    return context, (key, value)
