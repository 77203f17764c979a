"""Values of masks on a few positions: a mask whose expression depends on lengths alone is computed for four of them.

That settles which pairs it hides in whatever spelling: `triu` of ones, comparisons of `arange`, `-inf` filled in,
inverted, cut to a length.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .term import ABSENT, Term, is_none, lowest_of_dtype, number

POSITIONS = 4
HIDDEN_BELOW = -90.0
"""Additive values below this hide a key; the weight of such a key is less than 1e-39."""

_UNCHANGED = frozenset({"carried", "expand", "reshape", "contiguous", "unsqueeze", "squeeze", "repeat"})
NUMPY_OPERATORS: dict[str, Callable] = {
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.true_divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
"""Comparisons and operations of two arrays."""


def mask_values(term: Term | None) -> NDArray | None:
    r"""The values of a mask for four queries and four keys, or None where they depend on anything but lengths.

    >>> from .symbolic_evaluation import evaluate
    >>> facts = evaluate("import torch\ndef f(n): return torch.triu(torch.ones(n, n), diagonal=1).bool()")
    >>> mask_values(facts.operations("bool")[0].term).astype(int).tolist()
    [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    """
    if term is None:
        return None
    try:
        with np.errstate(all="ignore"):  # 0 · -inf
            found = _values(term, 30)
    except (TypeError, ValueError, IndexError):
        return None  # an expression that cannot be computed for these sizes
    if found is None:
        return None
    while found.ndim > 2 and found.shape[0] == 1:
        found = found[0]
    return found if found.shape == (POSITIONS, POSITIONS) else None


def _values(term: Term, depth: int) -> NDArray | None:  # one line for each operation
    if depth == 0:
        return None
    if term.op in _UNCHANGED:
        return _values(term.input, depth - 1)
    if term.op in ("ones", "zeros", "full"):
        return _filled(term, shape) if len(shape := _shape(term)) > 1 else None
    if term.op == "subsequent_mask":
        return np.where(np.triu(np.ones((POSITIONS, POSITIONS)), 1), -np.inf, 0.0)
    if term.op == "arange":
        from_zero = len(term.items) < 2 or number(term.items[0]) == 0
        return np.arange(POSITIONS) if from_zero else None
    if term.op == "item":
        return _indexed(term, depth)
    if term.op in ("ones_like", "zeros_like", "full_like"):
        model = _values(term.input, depth - 1)
        return None if model is None else _filled(term, model.shape)
    if term.op in NUMPY_OPERATORS:
        return _binary(term, depth)
    if term.op == "call" and term.value in ("torch.tensor", "torch.from_numpy", "torch.as_tensor", "torch.BoolTensor"):
        return _values(term.items[0], depth - 1) if term.items else None
    if term.op == "method" and term.value == "astype":
        found = _values(term.input, depth - 1)
        kind = str(term.items[0].value) if term.items else ""
        return None if found is None else found.astype(bool) if "bool" in kind else found
    inner = _values(term.input, depth - 1) if "input" in term.arguments else None
    if inner is None:
        return None
    if term.op in ("triu", "tril"):
        diagonal = number(term["diagonal"]) if "diagonal" in term.arguments else 0
        return None if diagonal is None or inner.ndim < 2 else getattr(np, term.op)(inner, int(diagonal))
    if term.op == "transpose":
        return np.swapaxes(inner, -1, -2) if inner.ndim >= 2 else None
    if term.op == "bool":
        return inner.astype(bool)
    if term.op == "cast":
        return _cast(inner, term.get("dtype"))
    if term.op in ("invert", "not"):
        return np.logical_not(inner) if inner.dtype == bool or term.op == "not" else None
    if term.op == "negative":
        return -inner
    if (term.op, term.value) in (("method", "isinf"), ("method", "isneginf")):
        return np.isinf(inner)
    return _filled_where(term, inner, depth)


def _shape(term: Term) -> tuple[int, ...]:
    size = term.get("size")
    sizes = term.items if size is None else size.items if size.op == "tuple" else (size,)
    return tuple(1 if number(one) == 1 else POSITIONS for one in sizes)


def _filled(term: Term, shape: tuple[int, ...]) -> NDArray | None:
    fill = {"ones": 1.0, "zeros": 0.0}.get(term.op.removesuffix("_like"), _operand(term["fill_value"], 1))
    return None if fill is None else _cast(np.full(shape, fill), term.get("dtype"))


def _filled_where(term: Term, inner: NDArray, depth: int) -> NDArray | None:
    where = {"masked_fill": term["mask"], "setitem": term["index"]}.get(term.op, ABSENT)
    mask, value = _values(where, depth - 1), _number(term.get("value"))
    if mask is None or value is None:
        return None
    return np.where(np.broadcast_to(mask.astype(bool), inner.shape), value, inner.astype(float))


def _binary(term: Term, depth: int) -> NDArray | None:
    one, other = _operand(term["input"], depth), _operand(term["other"], depth)
    if one is None or other is None or (one.ndim == 0 and other.ndim == 0):
        return None
    if term.op == "sub" and bool in (one.dtype, other.dtype):
        one, other = one.astype(float), other.astype(float)
    return NUMPY_OPERATORS[term.op](one, other)


def _operand(term: Term, depth: int) -> NDArray | None:
    if term.op == "constant" and isinstance(term.value, bool):
        return np.array(term.value)
    plain = _number(term)
    if plain is not None:
        return np.array(int(plain) if plain.is_integer() and abs(plain) < 1e6 else plain)
    return _values(term, depth - 1)


def _number(term: Term | None) -> float | None:
    return float(np.finfo(np.float32).min) if lowest_of_dtype(term) is not None else number(term)


def _indexed(term: Term, depth: int) -> NDArray | None:
    inner = _values(term.input, depth - 1)
    if inner is None:
        return None
    index: list = []
    for one in term.items:
        if is_none(one):
            index.append(None)
        elif one.op == "slice":
            index.append(slice(None))  # cut to lengths, which here are all the same
        elif one.op == "constant" and one.value is ...:
            index.append(...)
        else:
            return None
    return inner[tuple(index)]


def _cast(values: NDArray, dtype: Term | None) -> NDArray:
    name = str(dtype.value).rpartition(".")[2].rstrip("_") if dtype is not None and dtype.op == "name" else ""
    if name == "bool":
        return values.astype(bool)
    if name in ("uint8", "int", "int32", "int64", "long", "int8"):
        return values.astype(int)
    return values.astype(float) if name.startswith(("float", "bfloat", "half", "double")) else values


# What a mask hides


def hidden_pairs(values: NDArray, *, true_hides: bool) -> NDArray:
    """The pairs that a mask hides: where it is True or False, or where it adds a large negative number."""
    if values.dtype == bool:
        return values if true_hides else ~values
    return values.astype(float) < HIDDEN_BELOW


def hidden_triangle(mask: Term, *, true_hides: bool, as_booleans: bool = False) -> str:
    """As `triangle`, of the pairs that a mask hides, its numbers taken as booleans or not; "" for unknown values."""
    values = mask_values(mask)
    if values is None:
        return ""
    return triangle(hidden_pairs(values.astype(bool) if as_booleans else values, true_hides=true_hides))


def is_zero_one(values: NDArray) -> bool:
    """Whether a mask of numbers has ones and zeros alone, which hide nothing where they are added."""
    return values.dtype != bool and set(values.flatten().tolist()) == {0.0, 1.0}


def triangle(hidden: NDArray) -> str:
    """The hidden triangle: "future", "past", "future and self", "past and self", "nothing", "all" or "other"."""
    ones = np.ones((POSITIONS, POSITIONS), dtype=bool)
    names = {
        "future": np.triu(ones, 1),
        "future but the next": np.triu(ones, 2),
        "past": np.tril(ones, -1),
        "future and self": np.triu(ones, 0),
        "past and self": np.tril(ones, 0),
        "nothing": ~ones,
        "all": ones,
    }
    return next((name for name, pattern in names.items() if np.array_equal(hidden, pattern)), "other")
