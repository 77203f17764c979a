"""Symbolic values of Python expressions: the small intermediate representation that the rules of the doctor read.

The many spellings of one operation of torch (`a @ b`, `torch.matmul(a, b)`, `a.bmm(b)`) become one `Term` with one
operation name and named arguments. A name stands for the term that was assigned to it, so a formula that was written
over several statements is one tree.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
HALF = ("torch.float16", "torch.half", "torch.bfloat16")
"""The dtypes of half precision."""
_LONGEST = 30
"""Operations that are looked through."""
_LARGEST_TREE = 400
"""Terms that a walk visits: residual streams of deep functions share subterms, and grow without a bound."""


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """The symbolic value of an expression; compared by identity, or by `text`.

    `op` names the operation ("matmul", "softmax", "parameter", "call", ...), `arguments` its operands by the parameter
    names of torch, `items` operands without a name (sizes of a reshape, elements of a tuple), `value` what is not an
    operand (a constant, the name of a parameter, the qualified name of a function), `node` the place in the source.
    """

    op: str
    node: ast.AST
    arguments: dict[str, Term] = field(default_factory=dict)
    items: tuple[Term, ...] = ()
    value: Any = None

    def get(self, name: str) -> Term | None:
        """The argument of that name, or None where the call leaves it out."""
        return self.arguments.get(name)

    def __getitem__(self, name: str) -> Term:
        """The argument of that name, or `ABSENT`, of which no question about terms is true."""
        return self.arguments.get(name, ABSENT)

    @property
    def input(self) -> Term:
        """The tensor that the operation is applied to; the term itself where there is none."""
        return self.arguments.get("input", self)

    def applies(self, *modules: str) -> bool:
        """Whether it is a call of a module of one of these qualified class names."""
        return self.op == "apply" and self.value in modules

    def lacks(self, *names: str) -> bool:
        """Whether a call leaves all of these arguments out, or passes None."""
        return all(is_none(self.arguments.get(name)) for name in names)

    def operands(self) -> Iterator[Term]:
        """All direct operands."""
        yield from self.arguments.values()
        yield from self.items


ABSENT = Term("absent", ast.Pass())
"""An argument that a call leaves out."""


def walk(term: Term, *, stop: frozenset[str] = frozenset()) -> Iterator[Term]:
    """Each distinct subterm once, the term itself first; operands of the operations in `stop` are not visited."""
    waiting, seen = [term], {id(term)}
    while waiting and len(seen) < _LARGEST_TREE:
        one = waiting.pop()
        yield one
        if one.op in stop:
            continue
        for operand in one.operands():
            if id(operand) not in seen:
                seen.add(id(operand))
                waiting.append(operand)


def through(term: Term, *ops: str) -> Term:
    """What a term was computed from by these operations, each of the input of the one before."""
    while term.op in ops:
        term = term.input
    return term


def lineage(term: Term, *ops: str) -> Iterator[Term]:
    """A term, and what it was computed from by these operations, up to the first of another one, which is the last.

    Of a choice the first alternative is followed.
    """
    for _ in range(_LONGEST):
        yield term
        if term.op not in ops:
            return
        term = term.items[0] if term.op == "choice" else term.input


def indices(changed: Term) -> tuple[Term, ...]:
    """The parts of the index of an assignment to a part of a tensor."""
    index = changed["index"]
    return index.items if index.op == "tuple" else (index,)


def sides(term: Term) -> Iterator[tuple[Term, Term]]:
    """The operands of an operation of two, in either order; nothing where one of them is missing."""
    left, right = term.get("input"), term.get("other")
    if left is not None and right is not None:
        yield left, right
        yield right, left


def moved_axes(term: Term) -> list[int]:
    """The axes that a permutation puts in order, or that a transposition exchanges, in ascending order; else []."""
    exchanged = (term.get("dim0"), term.get("dim1")) if term.op == "transpose" else ()
    found = [number(one) for one in (term.items if term.op == "permute" else exchanged)]
    axes = [int(one) for one in found if one is not None]
    return [] if len(axes) < len(found) else sorted(axes) if exchanged else axes


def exchanges_middle(term: Term) -> bool:
    """Whether a term has axes 1 and 2 of its input, of four, in the other order."""
    return moved_axes(term) == ([1, 2] if term.op == "transpose" else [0, 2, 1, 3])


def text(term: Term | None, depth: int = 6) -> str:
    """A canonical spelling: equal for terms of the same structure, down to `depth` operations."""
    if term is None or term is ABSENT:
        return "-"
    if term.op in ("parameter", "constant", "name"):
        return f"{term.op[0]}:{term.value!r}"
    if depth == 0 or (term.op == "call" and str(term.value).startswith("torch.nn.")):  # two layers are never the same
        return f"#{id(term)}"
    inner = ",".join(text(operand, depth - 1) for operand in term.operands())
    return f"{term.op}[{term.value!r}]({inner})"


def same(one: Term | None, other: Term | None) -> bool:
    """Whether two terms are the same value, as far as their structure tells."""
    return one is other or (one is not None and other is not None and text(one) == text(other))


def is_none(term: Term | None) -> bool:
    """Whether an argument is left out or is the constant None."""
    return term is None or term is ABSENT or (term.op == "constant" and term.value is None)


def is_true(term: Term | None) -> bool:
    """Whether an argument is the constant True."""
    return term is not None and term.op == "constant" and term.value is True


def label(term: Term) -> str:
    """The name that the source uses for a value: a parameter, variable, attribute or called function; or ''."""
    node = term.node
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return next((value for name in ("attr", "id", "arg") if (value := getattr(node, name, None))), "")


def number(term: Term | None) -> float | None:
    """The value of a constant numeric expression, or None where it is not one."""
    if term is None:
        return None
    if term.op == "constant":
        return float(term.value) if isinstance(term.value, int | float) and not isinstance(term.value, bool) else None
    if term.op == "name":
        endings = {"inf": math.inf, "infty": math.inf, "pi": math.pi, "e": math.e}
        return endings.get(str(term.value).rpartition(".")[2]) if "." in str(term.value) else None
    if term.op == "call" and term.items:
        parsed = term.value == "float" and term.items[0].op == "constant"
        made = number(term.items[0]) if term.value in ("torch.tensor", "torch.Tensor") else None
        return _computed(float, term.items[0].value) if parsed else made
    if term.op == "cast":
        return number(term.input)
    if term.op in _ARITHMETIC:
        operands = [number(term[name]) for name in ("input", "other") if name in term.arguments]
        return None if None in operands else _computed(_ARITHMETIC[term.op], *operands)
    return None


def lowest_of_dtype(term: Term | None) -> Term | None:
    """The dtype argument where a term is `torch.finfo(dtype).min`, else None."""
    called = term.input if term is not None and term.op == "attribute" and term.value == "min" else ABSENT
    return called.items[0] if called.op == "call" and str(called.value).endswith("finfo") and called.items else None


def _computed(function: Callable[..., float], *operands: Any) -> float | None:
    try:
        return function(*operands)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": math.pow,
    "sqrt": math.sqrt,
    "negative": operator.neg,
}
