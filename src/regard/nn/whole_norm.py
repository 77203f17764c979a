"""Projections whose queries and keys are normed over all heads at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .input_checks import check_input
from .projections import Projections


class WholeNormProjections(Projections):
    """`Projections` whose `norm` is of all features of queries, and of keys, before they are split into heads.

    As in OLMo 2 and 3. norm is called with num_heads · head_dim, and with num_kv_heads · head_dim.

    >>> import torch, regard
    >>> projections = WholeNormProjections(12, 4, num_kv_heads=2, norm=regard.nn.RMSNorm)
    >>> projections.query_norm.dim, projections.key_norm.dim, projections.queries(torch.zeros(1, 5, 12)).shape
    (12, 6, torch.Size([1, 4, 5, 3]))
    """

    def __init__(self, dim: int, num_heads: int, *, norm: Any, **others: Any) -> None:
        super().__init__(dim, num_heads, **others)
        self.query_norm = norm(self.num_heads * self.head_dim)
        self.key_norm = norm(self.num_kv_heads * self.head_dim)

    def queries(self, inputs: Tensor) -> Tensor:
        check_input("query", inputs, self.dim, self)
        return _heads(self.query_norm(self.query(inputs)), self.num_heads)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        check_input("memory", memory, self.memory_dim or self.dim, self)
        keys = _heads(self.key_norm(self.key(memory)), self.num_kv_heads)
        return keys, _heads(self.value_map()(memory), self.num_kv_heads)


def _heads(projected: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · d) to (batch, heads, length, d): a view."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)
