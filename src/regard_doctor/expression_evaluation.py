"""Symbolic evaluation of expressions: each becomes a `Term`, with the names of the function around it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import array_frameworks
from .module_facts import ClassFacts, Event, Loop, ModuleFacts
from .python_syntax import Function
from .term import ABSENT, Term, is_none
from .torch_signatures import ALIASES

_EXPRESSIONS = 60_000
"""Expressions of one file that are evaluated before helpers are no longer followed."""
_FEW = 6
"""Elements of a comprehension that are evaluated one by one."""
OPERATORS: dict[type, str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.FloorDiv: "floordiv",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.Mod: "mod",
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
    ast.USub: "negative",
    ast.Invert: "invert",
    ast.Not: "not",
}
MODULE_LISTS = ("torch.nn.ModuleList", "list", "tuple")
_TRANSPOSED = {"T": None, "mT": -2, "H": None, "mH": -2}


class ExpressionEvaluation:
    """Evaluates expressions, one function at a time: `names` stand for terms, `loops` are around."""

    def __init__(self, facts: ModuleFacts) -> None:
        self.facts = facts
        self.names: dict[str, Term] = {}
        self.loops: tuple[Loop, ...] = ()
        self.function: Function | None = None
        self.class_: ClassFacts | None = None
        self.calls: list[Function] = []
        self.outermost: tuple[ClassFacts | None, ast.Call | None] = (None, None)
        self.returned: list[Term] = []
        self.lambdas: list[ast.Lambda] = []
        self.globals: dict[str, Term] = {}
        self.remaining = _EXPRESSIONS
        self.initialized: set[str] = set()
        self._forward_names = array_frameworks.FORWARD_NAMES if facts.framework else ("forward",)

    @contextmanager
    def _within(self, **state: Any) -> Iterator[None]:
        """Attributes with other values for a block: names, loops, the function that is evaluated."""
        outer = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(outer)

    def _make(
        self,
        op: str,
        node: ast.AST,
        arguments: dict[str, Term] | None = None,
        items: tuple[Term, ...] = (),
        value: object = None,
    ) -> Term:
        term = Term(op, node, arguments or {}, items, value)
        for operand in term.operands():
            self.facts.consumers[id(operand)].append(term)
        return term

    def _record(self, term: Term) -> Term:
        place = (self.loops, self.function, self.class_, len(self.calls))
        self.facts.events.append(Event(term, *place, *(self.outermost if self.calls else (None, None))))
        return term

    def _choice(self, one: Term, other: Term, node: ast.AST) -> Term:
        return one if one is other else self._make("choice", node, items=(one, other))

    def _expression(self, node: ast.expr) -> Term:
        self.remaining -= 1
        match node:
            case ast.Constant():
                return Term("constant", node, value=node.value)
            case ast.Name():
                return self._name(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                left, right = self._expression(node.left), self._expression(node.right)
                op = OPERATORS.get(type(node.op), "unknown")
                if op == "div" and left.op == "exp" and right.op == "sum" and right.input is left:
                    softmax = {"input": left.input, **({"dim": right.arguments["dim"]} if right.get("dim") else {})}
                    return self._record(self._make("softmax", node, softmax, value="softmax"))
                term = self._make(op, node, {"input": left, "other": right})
                return self._record(term) if op in ("matmul", "mul", "div", "add") else term
            case ast.UnaryOp():
                return self._make(OPERATORS.get(type(node.op), "plus"), node, {"input": self._expression(node.operand)})
            case ast.Compare():
                return self._comparison(node)
            case ast.BoolOp():
                items = tuple(self._expression(one) for one in node.values)
                return self._make("boolean", node, items=items, value="and" if isinstance(node.op, ast.And) else "or")
            case ast.IfExp():
                known = self._truth(self._expression(node.test))
                if known is not None:
                    return self._expression(node.body if known else node.orelse)
                one, other = self._expression(node.body), self._expression(node.orelse)
                return self._make("choice", node, {}, (one, other), value=ast.unparse(node.test))
            case ast.Subscript():
                return self._subscript(node)
            case ast.Tuple() | ast.List():
                return self._make("tuple", node, items=tuple(self._expression(one) for one in node.elts))
            case ast.Starred():
                return self._make("starred", node, {"input": self._expression(node.value)})
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.NamedExpr():
                value = self._expression(node.value)
                self._assign(node.target, value)
                return value
            case ast.Slice():
                parts = (one for one in (node.lower, node.upper, node.step))
                items = tuple(self._expression(one) if one else Term("constant", node, value=None) for one in parts)
                return self._make("slice", node, items=items)
            case ast.Lambda():
                return Term("function", node, value=node)
            case _:
                return Term("unknown", node)

    def _name(self, node: ast.Name) -> Term:
        if node.id in self.names:
            found = self.names[node.id]
            named = found.op == "constant" and found.value is not None
            return Term("constant", node, value=found.value) if named else found  # a constant is known by its name
        return Term("name", node, value=self._qualified(node.id))

    def _qualified(self, name: str) -> str:
        if name in self.facts.imports:
            return _canonical(self.facts.imports[name])
        if name in self.facts.functions or name in self.facts.classes:
            return name
        return ALIASES.get(name, name)

    def _attribute(self, node: ast.Attribute) -> Term:
        spelled = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""
        if spelled in self.names:
            return self.names[spelled]
        base = self._expression(node.value)
        if base.op == "name":
            return Term("name", node, value=_canonical(f"{base.value}.{node.attr}"))
        if base.op in ("self", "instance") and isinstance(base.value, ClassFacts):
            found = base.value.attributes.get(node.attr)
            if found is not None and node.attr not in base.value.changed and not is_none(found):
                return found
        if node.attr in _TRANSPOSED:
            return self._record(self._make("transpose", node, {"input": base}, value=node.attr))
        if node.attr == "shape":
            return self._make("shape", node, {"input": base})
        if node.attr == "data":
            return base
        return self._make("attribute", node, {"input": base}, value=node.attr)

    def _comparison(self, node: ast.Compare) -> Term:
        left, right = self._expression(node.left), self._expression(node.comparators[0])
        if len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot) and is_none(right):
            term = self._make("is_none", node, {"input": left})
            return term if isinstance(node.ops[0], ast.Is) else self._make("not", node, {"input": term})
        op = OPERATORS.get(type(node.ops[0]), "compare") if len(node.ops) == 1 else "compare"
        return self._make(op, node, {"input": left, "other": right})

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Term:
        with self._within(names=dict(self.names), loops=self.loops):
            listed = self._listed(node)
            if listed is not None:
                return listed
            for generator in node.generators:
                iterated = self._expression(generator.iter)
                self.loops = (*self.loops, Loop(node, loop_names(generator.target), iterated))
                self._bind_loop(generator.target, iterated, node)
            element = self._expression(node.elt)
        return self._make("comprehension", node, items=(element,))

    def _listed(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Term | None:
        """The results of a comprehension over a few known elements, such as query, key and value; else None."""
        generator = node.generators[0]
        if len(node.generators) != 1 or generator.ifs:
            return None
        iterated = self._expression(generator.iter)
        elements = self._known_elements(iterated, generator.iter)
        if elements is None:
            return None
        results, loop = [], Loop(node, loop_names(generator.target), iterated)
        for element in elements:
            with self._within(names=dict(self.names), loops=(*self.loops, loop)):
                self._assign(generator.target, element)
                results.append(self._expression(node.elt))
        return self._make("tuple", node, items=tuple(results))

    def _known_elements(self, iterated: Term, node: ast.AST) -> list[Term] | None:
        """The elements of a tuple, of a split into a number of parts, or of these side by side; None if not known."""
        if iterated.op == "tuple" and 0 < len(iterated.items) <= _FEW:
            return list(iterated.items)
        called = iterated.value if iterated.op == "call" else None
        counted = called == "range" and len(iterated.items) == 1
        count = iterated["chunks"] if iterated.op == "chunk" else iterated.items[0] if counted else ABSENT
        if count.op == "constant" and count.value in range(1, _FEW + 1):
            indices = range(count.value)
            if counted:
                return [Term("constant", node, value=index) for index in indices]
            return [self._element(iterated, index, node) for index in indices]
        parts = [self._known_elements(one, node) for one in iterated.items] if called == "zip" else []
        lengths = {len(one) for one in parts if one is not None}
        if len(lengths) != 1:
            return None
        pairs = zip(iterated.items, parts, strict=True)
        rows = [part or [self._iterated_element(one, node)] * min(lengths) for one, part in pairs]
        return [self._make("tuple", node, items=row) for row in zip(*rows, strict=True)]

    def _element(self, value: Term, index: int | None, node: ast.AST) -> Term:
        """One element of an unpacked or indexed value."""
        if value.op == "comprehension":
            return value.items[0]
        if index is None:
            return self._make("element", node, {"input": value})
        if value.op == "tuple" and -len(value.items) <= index < len(value.items):
            return value.items[index]
        if value.op == "shape":
            return self._make("size", node, {"input": value.input}, value=index)
        if value.op == "choice":
            one, other = (self._element(operand, index, node) for operand in value.items)
            return self._choice(one, other, node)
        return self._make("element", node, {"input": value}, value=index)

    def _iterated_element(self, iterated: Term | None, node: ast.AST) -> Term:
        """What a loop variable stands for: a module of a list of modules made alike, or an unknown element."""
        found = iterated
        while found is not None and found.op == "call" and found.value in MODULE_LISTS and found.items:
            found = found.items[0]
        if found is not None and found is not iterated and found.op in ("comprehension", "tuple") and found.items:
            return found.items[0]
        return self._make("loop_item", node, {} if iterated is None else {"input": iterated})

    def _subscript(self, node: ast.Subscript) -> Term:
        base, index = self._expression(node.value), self._expression(node.slice)
        sign = index.input.value if index.op == "negative" and index.input.op == "constant" else None
        position = -sign if isinstance(sign, int) else index.value if index.op == "constant" else None
        if isinstance(position, int) and not isinstance(position, bool):
            if base.op in ("tuple", "shape"):
                return self._element(base, position, node)
            if base.applies("torch.nn.MultiheadAttention"):
                return self._make("element", node, {"input": base}, value=position)
            if base.op == "call" and base.value in MODULE_LISTS:
                return self._iterated_element(base, node)
        items = index.items if index.op == "tuple" else (index,)
        return self._make("item", node, {"input": base}, items)

    # What the evaluation of statements and calls adds

    def _call(self, node: ast.Call) -> Term:
        raise NotImplementedError

    def _assign(self, target: ast.expr, value: Term) -> None:
        raise NotImplementedError

    def _bind_loop(self, target: ast.expr, iterated: Term | None, node: ast.AST) -> None:
        raise NotImplementedError

    def _truth(self, test: Term) -> bool | None:
        raise NotImplementedError


def loop_names(target: ast.expr) -> frozenset[str]:
    """The names that a loop binds."""
    return frozenset(one.id for one in ast.walk(target) if isinstance(one, ast.Name))


def _canonical(name: str) -> str:
    """A qualified name by the shortest public path that the tables know."""
    if name.startswith("torch.nn.modules."):
        return re.sub(r"^torch\.nn\.modules\.(activation\.)?", "torch.nn.", name)
    return array_frameworks.public_name(name)
