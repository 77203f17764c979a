"""The linear maps around attention: from vectors to heads, and from heads to vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .input_checks import check_input
from .linear import Linear

NAMES = ("query", "key", "value", "output")


class Projections(nn.Module):
    """Q_h = X W_q, K_g = Y W_k and V_g = Y W_v for each head, and [C_1; ...; C_H] W_o of all heads together.

    Query head h meets key head ⌊h · num_kv_heads / num_heads⌋: as many key heads as heads are multi-head attention,
    one is multi-query (Shazeer 2019, arXiv 1911.02150), any number between is grouped-query (Ainslie et al. 2023,
    arXiv 2305.13245). The parts are modules, `query`, `key`, `value` and `output`, that may be replaced by any other
    ones of the same dims.

    Shapes: inputs (batch, length, dim), what is remembered (batch, length, memory_dim); heads are
    (batch, heads, length, head_dim). Weights start Xavier uniform (Glorot and Bengio 2010), additive biases at 0.

    Args:
        dim: of the input and of the output.
        num_heads: heads of the query.
        num_kv_heads: heads of key and value; it divides num_heads, which it is without one.
        head_dim: of each query and key; dim / num_heads without one.
        value_dim: of each value; head_dim without one.
        memory_dim: the dim of another sequence, for a layer of cross-attention: such a layer always needs memory.
        bias: whether the maps add a bias, or the names of those that do, among query, key, value and output.
        norm: makes a module of a head's dim, for queries and for keys (Dehghani et al. 2023, arXiv 2302.05442).

    Raises:
        ConfigurationError: a number that is below 1, does not divide or is missing; an unknown name.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2, which has no additive biases.

    >>> import torch
    >>> projections = Projections(dim=12, num_heads=4, num_kv_heads=2, bias=False)
    >>> projections.queries(torch.zeros(5, 7, 12)).shape
    torch.Size([5, 4, 7, 3])
    >>> [tuple(heads.shape) for heads in projections.keys_and_values(torch.zeros(5, 7, 12))]
    [(5, 2, 7, 3), (5, 2, 7, 3)]
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        memory_dim: int | None = None,
        bias: bool | Collection[str] = True,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        self.num_kv_heads = _dividing(self.num_heads, num_kv_heads)
        self.head_dim = _head_dim(self.dim, self.num_heads) if head_dim is None else whole_number("head_dim", head_dim)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim)
        self.memory_dim = None if memory_dim is None else whole_number("memory_dim", memory_dim)
        source, biased = self.dim if memory_dim is None else memory_dim, _biased(bias)
        self.query = Linear(self.dim, self.num_heads * self.head_dim, "query" in biased)
        self.key = Linear(source, self.num_kv_heads * self.head_dim, "key" in biased)
        self.value = Linear(source, self.num_kv_heads * self.value_dim, "value" in biased)
        self.output = Linear(self.num_heads * self.value_dim, self.dim, "output" in biased)
        self.query_norm = nn.Identity() if norm is None else norm(self.head_dim)
        self.key_norm = nn.Identity() if norm is None else norm(self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights Xavier uniform, biases 0."""
        for linear in (self.query, self.key, self.value, self.output):
            xavier(linear)

    def queries(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, num_heads, length, head_dim)."""
        check_input("query", inputs, self.dim, self)
        return self.query_norm(_heads(self.query(inputs), self.num_heads))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, length, memory_dim) to (batch, num_kv_heads, length, head_dim) and (..., value_dim)."""
        check_input("memory", memory, self.memory_dim or self.dim, self)
        keys = self.key_norm(_heads(self.key(memory), self.num_kv_heads))
        return keys, _heads(self.value(memory), self.num_kv_heads)

    def joined(self, context: Tensor) -> Tensor:
        """(batch, num_heads, length, value_dim) to (batch, length, dim)."""
        return self.output(context.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def xavier(linear: nn.Linear) -> None:
    """A weight drawn Xavier uniform, and a bias of 0."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _heads(projected: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · d) to (batch, heads, length, d): a view."""
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _dividing(num_heads: int, num_kv_heads: int | None) -> int:
    number = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
    if num_heads % number:
        raise ConfigurationError(
            f"num_heads is {num_heads} and num_kv_heads {number}: each key head serves as many query heads as the "
            "others, so num_kv_heads has to divide num_heads"
        )
    return number


def _head_dim(dim: int, num_heads: int) -> int:
    if dim % num_heads:
        raise ConfigurationError(
            f"dim is {dim} and num_heads {num_heads}: without head_dim each head takes dim / num_heads, so num_heads "
            "has to divide dim; or give head_dim"
        )
    return dim // num_heads


def _biased(bias: bool | Collection[str]) -> Collection[str]:
    """The names of the maps that add a bias."""
    if isinstance(bias, bool):
        return NAMES if bias else ()
    names = (bias,) if isinstance(bias, str) else tuple(bias)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ConfigurationError(
            f"bias names {unknown[0]!r}; it needs True, False or some of {', '.join(map(repr, NAMES))}"
        )
    return names
