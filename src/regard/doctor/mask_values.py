"""Values of masks on a few positions: a mask whose expression depends on lengths alone is computed for four of them.

That settles which pairs it hides in whatever spelling: `triu` of ones, comparisons of `arange`, `-inf` filled in,
inverted, cut to a length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .term import Term, is_none, lowest_of_dtype, number

POSITIONS = 4
HIDDEN_BELOW = -90.0
"""Additive values below this hide a key; the weight of such a key is less than 1e-39."""

_UNCHANGED = frozenset({"carried", "expand", "reshape", "contiguous", "unsqueeze", "squeeze", "repeat"})
_COMPARISONS: dict[str, Callable] = {
    "equal": torch.eq,
    "not_equal": torch.ne,
    "less": torch.lt,
    "less_equal": torch.le,
    "greater": torch.gt,
    "greater_equal": torch.ge,
}
_ARITHMETIC: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


def mask_values(term: Term | None) -> torch.Tensor | None:
    r"""The values of a mask for four queries and four keys, or None where they depend on anything but lengths.

    >>> from .symbolic_evaluation import evaluate
    >>> facts = evaluate("import torch\ndef f(n): return torch.triu(torch.ones(n, n), diagonal=1).bool()")
    >>> mask_values(facts.operations("bool")[0].term).int().tolist()
    [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    """
    if term is None:
        return None
    try:
        found = _values(term, 30)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None  # an expression that torch refuses for these sizes
    if found is None:
        return None
    while found.dim() > 2 and found.shape[0] == 1:
        found = found[0]
    return found if found.shape == (POSITIONS, POSITIONS) else None


def _values(term: Term, depth: int) -> torch.Tensor | None:  # one line for each operation
    if depth == 0:
        return None
    if term.op in _UNCHANGED:
        return _values(term.input, depth - 1)
    if term.op in ("ones", "zeros", "full"):
        return _filled(term)
    if term.op == "subsequent_mask":
        return torch.full((POSITIONS, POSITIONS), -torch.inf).triu(1)
    if term.op == "arange":
        from_zero = len(term.items) < 2 or number(term.items[0]) == 0
        return torch.arange(POSITIONS) if from_zero else None
    if term.op == "item":
        return _indexed(term, depth)
    if term.op in ("ones_like", "zeros_like", "full_like"):
        return _filled_like(term, depth)
    if term.op in _COMPARISONS or term.op in _ARITHMETIC:
        return _binary(term, depth)
    if term.op == "call" and term.value in ("torch.tensor", "torch.from_numpy", "torch.as_tensor", "torch.BoolTensor"):
        return _values(term.items[0], depth - 1) if term.items else None
    if term.op in ("method",) and term.value == "astype":
        found = _values(term.input, depth - 1)
        kind = str(term.items[0].value) if term.items else ""
        return None if found is None else found.bool() if "bool" in kind else found
    inner = _values(term.input, depth - 1) if "input" in term.arguments else None
    if inner is None:
        return None
    if term.op in ("triu", "tril"):
        diagonal = _diagonal(term.get("diagonal"))
        return None if diagonal is None else getattr(inner, term.op)(diagonal)
    if term.op == "transpose":
        return inner.mT if inner.dim() >= 2 else None
    if term.op == "bool":
        return inner.bool()
    if term.op == "cast":
        return _cast(inner, term.get("dtype"))
    if term.op in ("invert", "not"):
        return inner.logical_not() if inner.dtype == torch.bool or term.op == "not" else None
    if term.op == "negative":
        return -inner
    if (term.op, term.value) in (("method", "isinf"), ("method", "isneginf")):
        return inner.isinf()
    return _filled_where(term, inner, depth)


def _filled(term: Term) -> torch.Tensor | None:
    sizes = list(term.items)
    size = term.get("size")
    if size is not None:
        sizes = list(size.items) if size.op == "tuple" else [size]
    shape = [1 if number(one) == 1 else POSITIONS for one in sizes]
    if len(shape) < 2:
        return None
    fill = {"ones": 1.0, "zeros": 0.0}.get(term.op)
    fill = _number(term.get("fill_value")) if fill is None else fill
    if fill is None:
        return None
    found = torch.full(shape, fill)
    given = term.get("fill_value")
    if given is not None and given.op == "constant" and isinstance(given.value, bool):
        return found.bool()
    return _cast(found, term.get("dtype"))


def _filled_like(term: Term, depth: int) -> torch.Tensor | None:
    model = _values(term.input, depth - 1)
    fill = {"ones_like": 1.0, "zeros_like": 0.0}.get(term.op)
    fill = _number(term.get("fill_value")) if fill is None else fill
    return None if model is None or fill is None else _cast(torch.full(model.shape, fill), term.get("dtype"))


def _filled_where(term: Term, inner: torch.Tensor, depth: int) -> torch.Tensor | None:
    if term.op == "masked_fill":
        mask, value = _mask(term, depth), _number(term.get("value"))
        return None if mask is None or value is None else inner.float().masked_fill(mask.bool(), value)
    if term.op == "setitem" and (index := term.get("index")) is not None:
        mask, value = _values(index, depth - 1), _number(term.get("value"))
        return None if mask is None or value is None else inner.float().masked_fill(mask.bool(), value)
    return None


def _mask(term: Term, depth: int) -> torch.Tensor | None:
    mask = term.get("mask")
    return None if mask is None else _values(mask, depth - 1)


def _binary(term: Term, depth: int) -> torch.Tensor | None:
    left, right = term.get("input"), term.get("other")
    if left is None or right is None:
        return None
    one, other = _operand(left, depth), _operand(right, depth)
    if one is None or other is None or (one.dim() == 0 and other.dim() == 0):
        return None
    if term.op in ("sub",) and torch.bool in (one.dtype, other.dtype):
        one, other = one.float(), other.float()
    return (_COMPARISONS | _ARITHMETIC)[term.op](one, other)


def _operand(term: Term, depth: int) -> torch.Tensor | None:
    if term.op == "constant" and isinstance(term.value, bool):
        return torch.tensor(term.value)
    plain = _number(term)
    if plain is not None:
        return torch.tensor(int(plain)) if plain.is_integer() and abs(plain) < 1e6 else torch.tensor(plain)
    return _values(term, depth - 1)


def _number(term: Term | None) -> float | None:
    return torch.finfo(torch.float32).min if lowest_of_dtype(term) is not None else number(term)


def _indexed(term: Term, depth: int) -> torch.Tensor | None:
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


def _diagonal(term: Term | None) -> int | None:
    if term is None:
        return 0
    found = number(term)
    return int(found) if found is not None else None


def _cast(values: torch.Tensor, dtype: Term | None) -> torch.Tensor:
    name = str(dtype.value).rpartition(".")[2] if dtype is not None and dtype.op == "name" else ""
    if name == "bool":
        return values.bool()
    if name in ("uint8", "int", "int32", "int64", "long", "int8"):
        return values.long()
    return values.float() if name.startswith(("float", "bfloat", "half", "double")) else values


# What a mask hides


def hidden_pairs(values: torch.Tensor, *, true_hides: bool) -> torch.Tensor:
    """The pairs that a mask hides: where it is True or False, or where it adds a large negative number."""
    if values.dtype == torch.bool:
        return values if true_hides else ~values
    return values.float() < HIDDEN_BELOW


def is_zero_one(values: torch.Tensor) -> bool:
    """Whether a mask of numbers has ones and zeros alone, which hide nothing where they are added."""
    return values.dtype != torch.bool and set(values.flatten().tolist()) == {0.0, 1.0}


def triangle(hidden: torch.Tensor) -> str:
    """The hidden triangle: "future", "past", "future and self", "past and self", "nothing", "all" or "other"."""
    ones = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool)
    names = {
        "future": ones.triu(1),
        "future but the next": ones.triu(2),
        "past": ones.tril(-1),
        "future and self": ones.triu(0),
        "past and self": ones.tril(0),
        "nothing": ~ones,
        "all": ones,
    }
    return next((name for name, pattern in names.items() if torch.equal(hidden, pattern)), "other")
