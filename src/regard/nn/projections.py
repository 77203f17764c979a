"""Query, key, value and output projections of multi-head attention."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import Tensor, nn

from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .input_checks import check_input
from .linear import Linear

PROJECTION_NAMES = ("query", "key", "value", "output")


class Projections(nn.Module):
    """Q_h = X W_q, K_g = Y W_k and V_g = Y W_v for each head, and [C_1; ...; C_H] W_o of all heads together.

    Query head h uses key head ⌊h · num_kv_heads / num_heads⌋. num_kv_heads = num_heads is multi-head attention, 1 is
    multi-query (Shazeer 2019, arXiv 1911.02150), any number between is grouped-query (Ainslie et al. 2023,
    arXiv 2305.13245). `query`, `key`, `value` and `output` are modules, and may be replaced by others of the same
    dims.

    Shapes: inputs (batch, length, dim), memory (batch, length, memory_dim), heads (batch, heads, length, head_dim).
    Weights start Xavier uniform (Glorot and Bengio 2010), additive biases at 0.

    Args:
        dim: of the input and of the output.
        num_heads: heads of the query.
        num_kv_heads: heads of key and value, a divisor of num_heads; num_heads by default.
        head_dim: of each query and key; dim / num_heads by default.
        value_dim: of each value; head_dim by default.
        memory_dim: dim of the memory, for a layer of cross-attention, which then always needs one.
        bias: whether the maps have an additive bias, or the names of those that do: query, key, value, output.
        norm: called with head_dim, returns a norm, one for queries and one for keys
            (Dehghani et al. 2023, arXiv 2302.05442).
        value_norm: called with value_dim, returns a norm of the values, as in Gemma 4.
        tied_values: whether V_g = Y W_k, keys before their norm: `value` is None, as in the full layers of Gemma 4.

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

    value: Linear
    """W_v; None with tied values, which few layers have."""

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
        value_norm: Callable[[int], nn.Module] | None = None,
        tied_values: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        self.num_kv_heads = _checked_kv_heads(self.num_heads, num_kv_heads)
        self.head_dim = _checked_head_dim(self.dim, self.num_heads, head_dim)
        self.value_dim = self.head_dim if value_dim is None else whole_number("value_dim", value_dim)
        self.memory_dim = None if memory_dim is None else whole_number("memory_dim", memory_dim)
        source, biased = self.dim if memory_dim is None else memory_dim, _names_with_bias(bias)
        self.query = Linear(self.dim, self.num_heads * self.head_dim, "query" in biased)
        self.key = Linear(source, self.num_kv_heads * self.head_dim, "key" in biased)
        _check_tied_values(tied_values, self.head_dim, self.value_dim)
        if tied_values:
            self.register_module("value", None)
        else:
            self.value = Linear(source, self.num_kv_heads * self.value_dim, "value" in biased)
        self.output = Linear(self.num_heads * self.value_dim, self.dim, "output" in biased)
        self.query_norm = nn.Identity() if norm is None else norm(self.head_dim)
        self.key_norm = nn.Identity() if norm is None else norm(self.head_dim)
        self.value_norm = nn.Identity() if value_norm is None else value_norm(self.value_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights Xavier uniform and biases with 0."""
        for linear in (self.query, self.key, self.value, self.output):
            if linear is not None:
                init_xavier(linear)

    def queries(self, inputs: Tensor) -> Tensor:
        """Queries of all heads: (batch, length, dim) to (batch, num_heads, length, head_dim)."""
        check_input("query", inputs, self.dim, self)
        return self.query_norm(_heads(self.query(inputs), self.num_heads))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (batch, num_kv_heads, length, head_dim) and values (..., value_dim) of (batch, length, memory_dim)."""
        check_input("memory", memory, self.memory_dim or self.dim, self)
        keys = _heads(self.key(memory), self.num_kv_heads)
        values = keys if self.value is None else _heads(self.value(memory), self.num_kv_heads)
        return self.key_norm(keys), self.value_norm(values)

    def value_map(self) -> Linear:
        """The map of values.

        Raises:
            ConfigurationError: there is none, as values are the projected keys.
        """
        if self.value is None:
            raise ConfigurationError(
                "values are the projected keys (tied_values), but the layer projects values by a map of their own: "
                "leave tied_values out"
            )
        return self.value

    def project_output(self, context: Tensor) -> Tensor:
        """Heads concatenated and projected by W_o: (batch, num_heads, length, value_dim) to (batch, length, dim)."""
        return self.output(context.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


class QueryProjections(nn.Module):
    """Q_h = X W_q, and [C_1; ...; C_H] W_o: a layer without keys and values, which reads those of another layer.

    An `Attention` of these has no memory of its own: each call gets `keys=`, what `project_memory` of the other layer
    returned. The other one's heads have to be `num_kv_heads` of `head_dim`. `query` and `output` are modules, and may
    be replaced by others of the same dims. Weights start Xavier uniform, additive biases at 0.

    Shapes: inputs (batch, length, dim), heads (batch, num_heads, length, head_dim).

    Args:
        dim: of the input and of the output.
        num_heads: heads of the query.
        num_kv_heads: heads of the keys and values that it reads, a divisor of num_heads; num_heads by default.
        head_dim: of each query, key and value; dim / num_heads by default.
        bias: whether the maps have an additive bias, or the names of those that do: query, output.
        norm: called with head_dim, returns the norm of the queries.

    Raises:
        ConfigurationError: a number that is below 1, does not divide or is missing; an unknown name.

    Source: Brandon et al. 2024, "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention" (arXiv
    2405.12981); Sun et al. 2024, "You Only Cache Once" (arXiv 2405.05254).

    >>> import torch
    >>> [name for name, _ in QueryProjections(dim=12, num_heads=4, bias=False).named_parameters()]
    ['query.weight', 'output.weight']
    """

    memory_dim = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool | Collection[str] = True,
        norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads = whole_number("dim", dim), whole_number("num_heads", num_heads)
        self.num_kv_heads = _checked_kv_heads(self.num_heads, num_kv_heads)
        self.head_dim = self.value_dim = _checked_head_dim(self.dim, self.num_heads, head_dim)
        biased = _names_with_bias(bias)
        self.query = Linear(self.dim, self.num_heads * self.head_dim, "query" in biased)
        self.output = Linear(self.num_heads * self.head_dim, self.dim, "output" in biased)
        self.query_norm = nn.Identity() if norm is None else norm(self.head_dim)
        for linear in (self.query, self.output):
            init_xavier(linear)

    def queries(self, inputs: Tensor) -> Tensor:
        """Queries of all heads: (batch, length, dim) to (batch, num_heads, length, head_dim)."""
        check_input("query", inputs, self.dim, self)
        return self.query_norm(_heads(self.query(inputs), self.num_heads))

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """There are none.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "this layer has no keys and values of its own: pass keys=, those of the layer that it shares, as "
            "project_memory of that one returns them"
        )

    def project_output(self, context: Tensor) -> Tensor:
        """Heads concatenated and projected by W_o: (batch, num_heads, length, head_dim) to (batch, length, dim)."""
        return self.output(context.transpose(1, 2).flatten(-2))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def init_xavier(linear: nn.Linear) -> None:
    """Initialise the weight Xavier uniform and the bias with 0."""
    nn.init.xavier_uniform_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _heads(projected: Tensor, heads: int) -> Tensor:
    """(batch, length, heads · d) to (batch, heads, length, d): a view."""
    batch, length, width = projected.shape
    return projected.view(batch, length, heads, width // heads).transpose(1, 2)


def _checked_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    number = num_heads if num_kv_heads is None else whole_number("num_kv_heads", num_kv_heads)
    if num_heads % number:
        raise ConfigurationError(
            f"num_heads is {num_heads} and num_kv_heads {number}: each key head serves as many query heads as the "
            "others, so num_kv_heads has to divide num_heads"
        )
    return number


def _checked_head_dim(dim: int, num_heads: int, head_dim: int | None) -> int:
    if head_dim is not None:
        return whole_number("head_dim", head_dim)
    if dim % num_heads:
        raise ConfigurationError(
            f"dim is {dim} and num_heads {num_heads}: without head_dim each head takes dim / num_heads, so num_heads "
            "has to divide dim; or give head_dim"
        )
    return dim // num_heads


def _check_tied_values(tied_values: bool, head_dim: int, value_dim: int) -> None:
    if tied_values and head_dim != value_dim:
        raise ConfigurationError(
            f"values that are the keys have head_dim={head_dim}, but value_dim is {value_dim}: leave value_dim or "
            "tied_values out"
        )


def _names_with_bias(bias: bool | Collection[str]) -> Collection[str]:
    """Names of the projections that have an additive bias."""
    if isinstance(bias, bool):
        return PROJECTION_NAMES if bias else ()
    names = (bias,) if isinstance(bias, str) or not isinstance(bias, Collection) else tuple(bias)
    unknown = [name for name in names if name not in PROJECTION_NAMES]
    if unknown:
        raise ConfigurationError(
            f"bias names {unknown[0]!r}; it needs True, False or some of {', '.join(map(repr, PROJECTION_NAMES))}"
        )
    return names
