"""The numbers of FIRE for all of few pairs at default positions, in C."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ...biases.fire import SMALLEST_LOG, Fire, register_pairs
from . import library
from .plain_rows import are_plain

LONGEST = 512
"""The most queries and keys, as in fire.c."""
MOST_PAIRS = 2**13
"""Of more pairs, torch's operators share the work among threads."""


class FirePairsInC:
    """Tensors of float32 on the CPU."""

    def takes(self, bias: Fire, queries: int, keys: int) -> bool:
        """Whether pairs are few, and nothing of torch's watches what becomes of the tensors."""
        few = 0 < queries * keys <= MOST_PAIRS and max(queries, keys) <= LONGEST
        return few and are_plain(*bias.tensors())

    def of_pairs(self, bias: Fire, queries: int, keys: int) -> Tensor:
        """The numbers, (heads, M, N)."""
        given = [tensor.contiguous() for tensor in bias.tensors()]
        heads, features = given[2].shape
        result = torch.empty(heads, queries, keys, dtype=torch.float32, device="cpu")
        places = [tensor.data_ptr() for tensor in given]
        numbers = array("q", (queries, keys, features, heads, *places, result.data_ptr()))
        library.current().fire(numbers.buffer_info()[0], SMALLEST_LOG)
        return result


register_pairs(FirePairsInC())
