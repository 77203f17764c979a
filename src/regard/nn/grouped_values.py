"""Projections of more value heads than heads of queries and keys: several states are written and read by one key."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .input_checks import check_input
from .linear import Linear
from .projections import Projections, init_xavier
from .whole_norm import WholeNormProjections


class GroupedValueProjections(Projections):
    """Projections of fewer query and key heads than value heads: head h has those of ⌊h · num_key_heads / num_heads⌋.

    As in Gated DeltaNet of Qwen3-Next, and in Mamba-2, whose B and C are keys and queries of `n_groups` heads. Heads of
    the layer, its states and its gates among them, are those of the values.

    Shapes: those of `Projections` with num_kv_heads = num_heads; `query` and `key` map to num_key_heads · head_dim
    features.

    Args:
        dim: of the input and of the output.
        num_heads: heads of the values.
        num_key_heads: heads of queries and keys, a divisor of num_heads.
        head_dim: of each query and key; dim / num_heads by default.
        value_dim: of each value; head_dim by default.
        bias: as of `Projections`.
        norm: as of `Projections`.

    Raises:
        ConfigurationError: numbers that are below 1, or do not divide.

    >>> import torch
    >>> projections = GroupedValueProjections(12, num_heads=4, num_key_heads=2, head_dim=5, value_dim=3)
    >>> keys, values = projections.keys_and_values(torch.zeros(1, 7, 12))
    >>> keys.shape, values.shape, projections.key.weight.shape
    (torch.Size([1, 4, 7, 5]), torch.Size([1, 4, 7, 3]), torch.Size([10, 12]))
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_key_heads: int,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool | Collection[str] = True,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim=head_dim, value_dim=value_dim, bias=bias, norm=norm)
        self.num_key_heads = whole_number("num_key_heads", num_key_heads)
        if self.num_heads % self.num_key_heads:
            raise ConfigurationError(
                f"num_heads is {num_heads} and num_key_heads {num_key_heads}: each query and key serves as many values "
                "as the others, so num_key_heads has to divide num_heads"
            )
        features = self.num_key_heads * self.head_dim
        self.query = Linear(dim, features, self.query.bias is not None)
        self.key = Linear(dim, features, self.key.bias is not None)
        for linear in (self.query, self.key):
            init_xavier(linear)

    def queries(self, inputs: Tensor) -> Tensor:
        check_input("query", inputs, self.dim, self)
        return self._of_values(self.query_norm(_heads(self.query(inputs), self.head_dim)))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        check_input("memory", memory, self.dim, self)
        keys = self._of_values(self.key_norm(_heads(self.key(memory), self.head_dim)))
        return keys, _heads(self.value_map()(memory), self.value_dim)

    def _of_values(self, heads: Tensor) -> Tensor:
        """The query or key of each value head."""
        return heads.repeat_interleave(self.num_heads // self.num_key_heads, 1)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_key_heads={self.num_key_heads}"


def split_heads(projections: Projections, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all heads, normed, of projected features (batch, length, ·), as layers have them."""
    queries, keys, values = query, key, _heads(value, projections.value_dim)
    if isinstance(projections, WholeNormProjections):
        queries, keys = projections.query_norm(queries), projections.key_norm(keys)
    queries, keys = _heads(queries, projections.head_dim), _heads(keys, projections.head_dim)
    if not isinstance(projections, WholeNormProjections):
        queries, keys = projections.query_norm(queries), projections.key_norm(keys)
    group = values.shape[1] // max(keys.shape[1], 1)
    if group > 1:
        queries, keys = queries.repeat_interleave(group, 1), keys.repeat_interleave(group, 1)
    return queries, keys, values


def _heads(projected: Tensor, dim: int) -> Tensor:
    """(batch, length, heads · d) to (batch, heads, length, d): a view."""
    return projected.unflatten(-1, (-1, dim)).transpose(1, 2)
