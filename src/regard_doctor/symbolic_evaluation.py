"""Symbolic evaluation of one module: follows assignments, branches, loops and helpers, and runs nothing.

Each function is evaluated statement by statement; its names stand for `Term`s. Where two branches disagree, a name
stands for the choice of both. Helper functions, methods and modules of the same file are evaluated in place at their
calls, three deep. Everything that is called is recorded, with the loops, the function and the class around it.
"""

from __future__ import annotations

import ast
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from . import array_frameworks
from .term import Term, is_none
from .torch_signatures import ALIASES, CASTS, CONSTRUCTORS, FORWARD, FUNCTIONS, METHODS, PARAMETERS

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_DEEPEST = 3
"""Calls of helpers within calls of helpers that are followed."""
_EXPRESSIONS = 60_000
"""Expressions of one file that are evaluated before helpers are no longer followed."""
_FEW = 6
"""Elements of a comprehension that are evaluated one by one."""
_LONGEST_FUNCTION = 300
"""Lines of a helper that is followed."""

_OPERATORS: dict[type, str] = {
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
_LINEAR = "torch.nn.Linear"
_KEYWORDS = {"k": "diagonal", "axis": "dim", "exponent": "other", "tensor": "input", "mat2": "other"}
_MODULE_LISTS = ("torch.nn.ModuleList", "list", "tuple")
_TRANSPOSED = {"T": None, "mT": -2, "H": None, "mH": -2}


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """A loop, or a comprehension, around an expression; `names` are its variables."""

    node: ast.AST
    names: frozenset[str]
    iterated: Term | None


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """An evaluated operation and the place that it was evaluated at.

    `depth` counts the followed calls around it; `caller` is the class whose method makes the outermost of these, at
    `call`.
    """

    term: Term
    loops: tuple[Loop, ...]
    function: Function | None
    class_: ClassFacts | None
    depth: int
    caller: ClassFacts | None = None
    call: ast.Call | None = None


@dataclass(slots=True, eq=False)
class ClassFacts:
    """A class: its methods, and the terms that its constructor assigns to attributes of `self`."""

    node: ast.ClassDef
    methods: dict[str, Function]
    attributes: dict[str, Term] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.node.name


@dataclass(slots=True, eq=False)
class ModuleFacts:
    """All that symbolic evaluation found in one module.

    `events` in the order of evaluation; `consumers` maps the identity of a term to what was computed from it;
    `followed` are the functions that were evaluated in place at a call; `nodes` has the nodes of the tree by their
    types, `parents` the node above each; `is_test`: the file is one of tests or benchmarks, by its path or its imports;
    `path`: where it is, beside the files that it imports; `framework`: jax or another one whose arrays it computes
    with instead of torch's tensors, "" for torch.
    """

    tree: ast.Module
    source: str
    imports: dict[str, str]
    functions: dict[str, Function]
    classes: dict[str, ClassFacts]
    events: list[Event] = field(default_factory=list)
    consumers: defaultdict[int, list[Term]] = field(default_factory=lambda: defaultdict(list))
    followed: set[Function] = field(default_factory=set)
    sites: list = field(default_factory=list)
    is_test: bool = False
    path: str = ""
    framework: str = ""
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    nodes: defaultdict[type, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def operations(self, *ops: str) -> list[Event]:
        """The events of these operations."""
        return [event for event in self.events if event.term.op in ops]

    def applied(self, *modules: str) -> list[Event]:
        """The calls of modules of these qualified class names."""
        return [event for event in self.events if event.term.op == "apply" and event.term.value in modules]


def evaluate(source: str, tree: ast.Module | None = None) -> ModuleFacts:
    r"""Evaluate a module.

    Raises:
        SyntaxError: the source is no Python of this interpreter's version.

    >>> facts = evaluate("def f(q, k):\n    s = q @ k.mT\n    return s.softmax(-1)")
    >>> [event.term.op for event in facts.events]
    ['transpose', 'matmul', 'softmax', 'return']
    """
    facts = ModuleFacts(tree or ast.parse(source), source, {}, {}, {})
    _index(facts)
    changed = _changed(facts)
    for node in facts.nodes[ast.ClassDef]:
        methods = {one.name: one for one in node.body if isinstance(one, Function)}
        facts.classes.setdefault(node.name, ClassFacts(node, methods, changed=changed.get(node, frozenset())))
    facts.functions.update({node.name: node for node in facts.tree.body if isinstance(node, Function)})
    _Evaluator(facts).module()
    return facts


def _index(facts: ModuleFacts) -> None:
    """Find all nodes by their types, the node above each, and the qualified name that each imported name stands for."""
    waiting: list[ast.AST] = [facts.tree]
    for node in waiting:  # grows while it is read: from the top of the tree down, each level in the order of the source
        facts.nodes[type(node)].append(node)
        for value in vars(node).values():
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context | ast.operator):
                    facts.parents[child] = node
                    waiting.append(child)
    for node in facts.nodes[ast.Import]:
        for alias in node.names:
            facts.imports[alias.asname or alias.name.split(".")[0]] = (
                alias.name if alias.asname else alias.name.split(".")[0]
            )
    for node in facts.nodes[ast.ImportFrom]:
        facts.imports.update({alias.asname or alias.name: f"{node.module or ''}.{alias.name}" for alias in node.names})
    facts.framework = array_frameworks.framework_of(facts.imports.values())


def _changed(facts: ModuleFacts) -> dict[ast.AST, frozenset[str]]:
    """Attributes of `self` that methods other than the constructor assign, by class."""
    found: dict[ast.AST, set[str]] = {}
    for node in facts.nodes[ast.Attribute]:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            above: ast.AST = node
            while above in facts.parents and not isinstance(above, Function):
                above = facts.parents[above]
            if isinstance(above, Function) and above.name != "__init__":
                found.setdefault(facts.parents[above], set()).add(node.attr)
    return {class_: frozenset(names) for class_, names in found.items()}


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind, those of loops and branches in them too."""
    found = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(f"{ast.unparse(node.value)}.{node.attr}")
    return found


class _Returned(Exception):
    """The rest of a block is not reached."""


class _Evaluator:
    """Evaluates the functions of a module; one at a time, with the names of that one."""

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

    # Functions and classes

    def module(self) -> None:
        """Evaluate the statements of the module, then every class and function."""
        for one in self.facts.tree.body:
            with contextlib.suppress(_Returned):  # a module may raise too
                self._block([] if isinstance(one, Function | ast.ClassDef) else [one])
        globals_ = self.globals = dict(self.names)
        for name in list(self.facts.classes):
            self.names = dict(globals_)
            self._initialize(name)
        for class_ in self.facts.classes.values():
            for name, method in class_.methods.items():
                if name != "__init__":
                    self.names = dict(globals_)
                    self._standalone(method, class_)
        for function in self.facts.functions.values():
            self.names = dict(globals_)
            self._standalone(function, None)

    def _initialize(self, name: str) -> None:
        """Evaluate the constructor of a class, those of its bases in this file first."""
        if name in self.initialized or name not in self.facts.classes:
            return
        self.initialized.add(name)
        class_ = self.facts.classes[name]
        for base in class_.node.bases:
            if isinstance(base, ast.Name) and base.id in self.facts.classes and base.id != name:
                self._initialize(base.id)
                parent = self.facts.classes[base.id]
                class_.attributes.update(parent.attributes)
                class_.methods = {**parent.methods, **class_.methods}
        outer = self.names
        self.names = dict(outer)
        if "__init__" in class_.methods:
            self._standalone(class_.methods["__init__"], class_)
            for key, term in self.names.items():
                if key.startswith("self."):
                    class_.attributes[key.removeprefix("self.")] = term
        self.names = outer

    def _standalone(self, function: Function, class_: ClassFacts | None) -> None:
        """Evaluate a function by itself: its parameters may be anything."""
        self.function, self.class_, self.loops, self.returned = function, class_, (), []
        arguments = function.args
        for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.names[parameter.arg] = self._parameter(parameter)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                self.names[rest.arg] = Term("parameter", rest, value=rest.arg)
        if class_ is not None and arguments.args:
            self.names[arguments.args[0].arg] = Term("self", function, value=class_)
        self._run(function.body)
        self.function = self.class_ = None

    def _parameter(self, parameter: ast.arg) -> Term:
        """A parameter; an instance where its annotation is a class of this file, whose methods can be followed."""
        annotation = parameter.annotation
        name = annotation.id if isinstance(annotation, ast.Name) else getattr(annotation, "value", None)
        class_ = self.facts.classes.get(name) if isinstance(name, str) else None
        if class_ is not None and class_.methods:
            return Term("instance", parameter, value=class_)
        return Term("parameter", parameter, value=parameter.arg)

    def _run(self, body: Sequence[ast.stmt]) -> None:
        with contextlib.suppress(_Returned):
            self._block(body)

    def _follow(
        self, function: Function, node: ast.Call, receiver: Term | None, positional: list[Term], named: dict[str, Term]
    ) -> Term | None:
        """The value of a call of a function of this file, evaluated with these arguments; None if not followed."""
        if len(self.calls) >= _DEEPEST or function in self.calls or self.remaining <= 0 or function is self.function:
            return None
        lines = (function.end_lineno or 0) - function.lineno
        if lines > _LONGEST_FUNCTION or any(one.op == "starred" for one in positional):
            return None
        bound = self._bind_function(function, receiver, positional, named)
        if bound is None:
            return None
        self.facts.followed.add(function)
        outer = self.names, self.function, self.class_, self.returned
        if not self.calls:
            self.outermost = self.class_, node
        keep = (
            {name: term for name, term in self.names.items() if "." not in name} if receiver is None else self.globals
        )
        self.names, self.function, self.returned = {**keep, **bound}, function, []
        self.class_ = receiver.value if receiver is not None else None
        self.calls.append(function)
        try:
            self._run(function.body)
            results = self.returned
        finally:
            self.calls.pop()
            self.names, self.function, self.class_, self.returned = outer
        if not results:
            return Term("constant", node, value=None)
        value = results[0]
        for other in results[1:]:
            value = self._choice(value, other, node)
        return value

    def _bind_function(
        self, function: Function, receiver: Term | None, positional: list[Term], named: dict[str, Term]
    ) -> dict[str, Term] | None:
        """Parameters and their arguments, defaults included; None where they do not fit."""
        arguments = function.args
        static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
        values = [receiver, *positional] if receiver is not None and not static else list(positional)
        parameters = [*arguments.posonlyargs, *arguments.args]
        if len(values) > len(parameters) and arguments.vararg is None:
            return None
        bound: dict[str, Term] = {}
        defaults = dict(zip([one.arg for one in parameters[::-1]], arguments.defaults[::-1], strict=False))
        defaults |= {
            one.arg: default
            for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            if default is not None
        }
        for index, parameter in enumerate([*parameters, *arguments.kwonlyargs]):
            if index < min(len(values), len(parameters)):
                bound[parameter.arg] = values[index]
            elif parameter.arg in named:
                bound[parameter.arg] = named[parameter.arg]
            elif parameter.arg in defaults and not _is_flag(defaults[parameter.arg]):
                bound[parameter.arg] = self._expression(defaults[parameter.arg])
            else:
                bound[parameter.arg] = Term("parameter", parameter, value=parameter.arg)
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                bound[rest.arg] = Term("parameter", rest, value=rest.arg)
        return bound

    # Statements

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign():
                value = self._expression(node.value)
                for target in node.targets:
                    self._assign(target, value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, self._expression(node.value))
            case ast.AugAssign():
                self._augmented(node)
            case ast.Expr():
                self._expression_statement(node.value)
            case ast.Return():
                value = self._expression(node.value) if node.value else Term("constant", node, value=None)
                self.returned.append(value)
                self._record(self._make("return", node, {"input": value}))
                raise _Returned
            case ast.Raise() | ast.Continue() | ast.Break():
                raise _Returned
            case ast.If():
                self._branches(node)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._loop(node)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self._expression(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value)
                self._block(node.body)
            case ast.Try():
                self._block([*node.body, *node.orelse, *node.finalbody])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._nested_function(node)
            case ast.Assert():
                self._expression(node.test)
            case _:
                pass

    def _nested_function(self, node: Function) -> None:
        outer = self.names, self.function, self.loops, self.returned, self.class_
        self.names = dict(self.names)
        class_ = self.class_
        self._standalone(node, None)
        self.names, self.function, self.loops, self.returned, self.class_ = outer
        self.class_ = class_
        self.names[node.name] = Term("function", node, value=node)

    def _expression_statement(self, node: ast.expr) -> None:
        """An expression for its effect: in-place methods of a name bind that name anew, buffers become attributes."""
        value = self._expression(node)
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return
        if node.func.attr.endswith("_") and isinstance(node.func.value, ast.Name | ast.Attribute):
            self._assign(node.func.value, value)
        elif node.func.attr == "register_buffer" and len(value.items) >= 2 and value.items[0].op == "constant":
            self.names[f"self.{value.items[0].value}"] = value.items[1]

    def _augmented(self, node: ast.AugAssign) -> None:
        operand = self._expression(node.value)
        if isinstance(node.target, ast.Subscript):
            self._expression(node.target)
            return
        load = ast.copy_location(ast.parse(ast.unparse(node.target), mode="eval").body, node.target)
        before = self._expression(load)
        op = _OPERATORS.get(type(node.op), "unknown")
        value = self._make(op, node, {"input": before, "other": operand})
        if op == "matmul":
            self._record(value)
        self._assign(node.target, value)

    def _assign(self, target: ast.expr, value: Term) -> None:
        match target:
            case ast.Name():
                self.names[target.id] = value
            case ast.Attribute():
                self.names[ast.unparse(target)] = value
                self._record(self._make("store", target, {"input": value}, value=ast.unparse(target)))
            case ast.Tuple() | ast.List():
                if value.op == "shape":
                    names = [one.id if isinstance(one, ast.Name) else "" for one in target.elts]
                    self._record(self._make("unpack", target, {"input": value.input}, value=names))
                starred = any(isinstance(one, ast.Starred) for one in target.elts)
                for index, one in enumerate(target.elts):
                    inner = one.value if isinstance(one, ast.Starred) else one
                    self._assign(inner, self._element(value, None if starred else index, inner))
            case ast.Subscript():
                base, index = self._expression(target.value), self._expression(target.slice)
                changed = self._make("setitem", target, {"input": base, "index": index, "value": value})
                self._record(changed)
                if isinstance(target.value, ast.Name | ast.Attribute):
                    self.names[ast.unparse(target.value)] = changed
            case _:
                pass

    def _element(self, value: Term, index: int | None, node: ast.AST) -> Term:
        """One element of an unpacked or indexed value."""
        if index is not None and value.op == "tuple" and -len(value.items) <= index < len(value.items):
            return value.items[index]
        if value.op == "comprehension":
            return value.items[0]
        if value.op == "shape" and index is not None:
            return self._make("size", node, {"input": value.input}, value=index)
        if value.op == "choice" and index is not None:
            one, other = (self._element(operand, index, node) for operand in value.items)
            return self._choice(one, other, node)
        return self._make("element", node, {"input": value}, value=index)

    def _branches(self, node: ast.If) -> None:
        known = self._truth(self._expression(node.test))
        before, results = dict(self.names), []
        for taken, body in ((True, node.body), (False, node.orelse)):
            if known is not None and known is not taken:
                continue
            self.names = dict(before)
            try:
                self._block(body)
            except _Returned:
                continue
            results.append(self.names)
        if not results:
            raise _Returned
        self.names = results[0]
        if len(results) == 2:
            self._merge(results[0], results[1], node)

    def _merge(self, one: dict[str, Term], other: dict[str, Term], node: ast.AST) -> None:
        """The names after two branches: where these disagree, the choice of both."""
        merged = {}
        for name in {**one, **other}:
            if name in one and name in other:
                merged[name] = one[name] if one[name] is other[name] else self._choice(one[name], other[name], node)
            else:
                merged[name] = one.get(name) or other[name]
        self.names = merged

    def _choice(self, one: Term, other: Term, node: ast.AST) -> Term:
        return one if one is other else self._make("choice", node, items=(one, other))

    def _truth(self, test: Term) -> bool | None:
        """Whether a condition holds, where that does not depend on the run."""
        if test.op == "constant" and (test.value is None or isinstance(test.value, bool)):
            return bool(test.value)
        if test.op == "not":
            inner = self._truth(test.input)
            return None if inner is None else not inner
        if test.op == "boolean":
            known = [self._truth(item) for item in test.items]
            if test.value == "and":
                return False if False in known else (True if all(known) else None)
            return True if True in known else (False if not any(one is None for one in known) else None)
        if test.op == "is_none":
            if is_none(test.input):
                return True
            if test.input.op in ("matmul", "softmax", "apply", "tril", "triu", "masked_fill", "reshape", "transpose"):
                return False
        return None

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        if isinstance(node, ast.While):
            self._expression(node.test)
            loop = Loop(node, frozenset(), None)
        else:
            iterated = self._expression(node.iter)
            names = frozenset(one.id for one in ast.walk(node.target) if isinstance(one, ast.Name))
            loop = Loop(node, names, iterated)
        before = dict(self.names)
        for name in _assigned(node.body) & before.keys() - loop.names:
            self.names[name] = self._make("carried", node, {"input": before[name]}, value=name)
        outer, self.loops = self.loops, (*self.loops, loop)
        if isinstance(node, ast.For | ast.AsyncFor):
            self._bind_loop(node.target, loop.iterated, node)
        with contextlib.suppress(_Returned):
            self._block(node.body)
        self.loops = outer
        self._merge(before, self.names, node)
        self._block(node.orelse)

    def _bind_loop(self, target: ast.expr, iterated: Term | None, node: ast.AST) -> None:
        """Bind the variables of a loop to an element of what is iterated."""
        if iterated is not None and iterated.op == "call" and isinstance(target, ast.Tuple):
            parts: list[Term | None] = []
            if iterated.value == "zip":
                parts = list(iterated.items)
            elif iterated.value == "enumerate" and iterated.items:
                parts = [None, iterated.items[0]]
            if len(parts) == len(target.elts):
                for one, part in zip(target.elts, parts, strict=True):
                    self._bind_loop(one, part, node)
                return
        self._assign(target, self._iterated_element(iterated, target))

    def _iterated_element(self, iterated: Term | None, node: ast.AST) -> Term:
        """What a loop variable stands for: a module of a list of modules made alike, or an unknown element."""
        found = iterated
        while found is not None and found.op == "call" and found.value in _MODULE_LISTS and found.items:
            found = found.items[0]
        if found is not None and found is not iterated:
            if found.op == "comprehension":
                return found.items[0]
            if found.op == "tuple" and found.items:
                return found.items[0]
        arguments = {} if iterated is None else {"input": iterated}
        return self._make("loop_item", node, arguments)

    # Expressions

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
                op = _OPERATORS.get(type(node.op), "unknown")
                if op == "div" and left.op == "exp" and right.op == "sum" and right.input is left:
                    softmax = {"input": left.input, **({"dim": right.arguments["dim"]} if right.get("dim") else {})}
                    return self._record(self._make("softmax", node, softmax, value="softmax"))
                term = self._make(op, node, {"input": left, "other": right})
                return self._record(term) if op in ("matmul", "mul", "div", "add") else term
            case ast.UnaryOp():
                return self._make(
                    _OPERATORS.get(type(node.op), "plus"), node, {"input": self._expression(node.operand)}
                )
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
        op = _OPERATORS.get(type(node.ops[0]), "compare") if len(node.ops) == 1 else "compare"
        return self._make(op, node, {"input": left, "other": right})

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Term:
        outer_names, outer_loops = self.names, self.loops
        self.names = dict(self.names)
        listed = self._listed(node)
        if listed is not None:
            return listed
        for generator in node.generators:
            iterated = self._expression(generator.iter)
            names = frozenset(one.id for one in ast.walk(generator.target) if isinstance(one, ast.Name))
            self.loops = (*self.loops, Loop(node, names, iterated))
            self._bind_loop(generator.target, iterated, node)
        element = self._expression(node.elt)
        self.names, self.loops = outer_names, outer_loops
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
        outer_names, outer_loops, results = self.names, self.loops, []
        names = frozenset(one.id for one in ast.walk(generator.target) if isinstance(one, ast.Name))
        self.loops = (*self.loops, Loop(node, names, iterated))
        for element in elements:
            self.names = dict(outer_names)
            self._assign(generator.target, element)
            results.append(self._expression(node.elt))
        self.names, self.loops = outer_names, outer_loops
        return self._make("tuple", node, items=tuple(results))

    def _known_elements(self, iterated: Term, node: ast.AST) -> list[Term] | None:
        """The elements of a tuple, of a split into a number of parts, or of these side by side; None if not known."""
        if iterated.op == "tuple" and 0 < len(iterated.items) <= _FEW:
            return list(iterated.items)
        count = iterated.get("chunks") if iterated.op == "chunk" else None
        if count is not None and count.op == "constant" and count.value in range(1, _FEW + 1):
            return [self._element(iterated, index, node) for index in range(count.value)]
        if iterated.op == "call" and iterated.value == "range" and len(iterated.items) == 1:
            length = iterated.items[0]
            if length.op == "constant" and length.value in range(1, _FEW + 1):
                return [Term("constant", node, value=index) for index in range(length.value)]
        if iterated.op == "call" and iterated.value == "zip":
            parts = [self._known_elements(one, node) for one in iterated.items]
            lengths = {len(one) for one in parts if one is not None}
            if len(lengths) != 1:
                return None
            rows = [
                part or [self._iterated_element(one, node)] * min(lengths)
                for one, part in zip(iterated.items, parts, strict=True)
            ]
            return [self._make("tuple", node, items=row) for row in zip(*rows, strict=True)]
        return None

    def _subscript(self, node: ast.Subscript) -> Term:
        base, index = self._expression(node.value), self._expression(node.slice)
        sign = index.input.value if index.op == "negative" and index.input.op == "constant" else None
        position = -sign if isinstance(sign, int) else index.value if index.op == "constant" else None
        if isinstance(position, int) and not isinstance(position, bool):
            if base.op in ("tuple", "shape"):
                return self._element(base, position, node)
            if base.op == "apply" and base.value == "torch.nn.MultiheadAttention":
                return self._make("element", node, {"input": base}, value=position)
            if base.op == "call" and base.value in _MODULE_LISTS:
                return self._iterated_element(base, node)
        items = index.items if index.op == "tuple" else (index,)
        return self._make("item", node, {"input": base}, items)

    # Calls

    def _call(self, node: ast.Call) -> Term:
        positional = [self._expression(one) for one in node.args]
        named = {one.arg: self._expression(one.value) for one in node.keywords if one.arg is not None}
        for one in node.keywords:
            if one.arg is None:
                named["**"] = self._expression(one.value)
        if isinstance(node.func, ast.Attribute):
            spelled = f"{node.func.value.id}.{node.func.attr}" if isinstance(node.func.value, ast.Name) else ""
            base = self._expression(node.func.value)
            if base.op != "name" and spelled not in self.names:
                return self._method(node, node.func.attr, base, positional, named)
        function = self._expression(node.func)
        if function.op == "name":
            return self._named_call(node, str(function.value), positional, named)
        if function.op == "function" and isinstance(function.value, Function):
            value = self._follow(function.value, node, None, positional, named)
            if value is not None:
                return value
        if function.op == "function" and isinstance(function.value, ast.Lambda) and not named:
            value = self._lambda(function.value, positional)
            if value is not None:
                return value
        return self._apply(node, function, positional, named)

    def _lambda(self, function: ast.Lambda, positional: list[Term]) -> Term | None:
        """The value of a lambda of this many arguments; None where it calls itself or takes others."""
        names = [one.arg for one in function.args.args]
        if len(names) != len(positional) or function in self.lambdas or self.remaining <= 0:
            return None
        outer = self.names
        self.names = {**outer, **dict(zip(names, positional, strict=True))}
        self.lambdas.append(function)
        try:
            return self._expression(function.body)
        finally:
            self.lambdas.pop()
            self.names = outer

    def _named_call(self, node: ast.Call, name: str, positional: list[Term], named: dict[str, Term]) -> Term:
        if name in FUNCTIONS:
            return self._operation(FUNCTIONS[name], node, positional, named, name)
        if (found := array_frameworks.framework_call(name, node, positional, named, self._make)) is not None:
            return self._record(found[0]) if found[1] else found[0]
        if (op := array_frameworks.FUNCTIONS.get(name)) is not None:
            positional, named = array_frameworks.operands(op, name, positional, named, node, self._make)
            return self._operation(op, node, positional, named, name)
        if name in ("torch.baddbmm", "torch.addmm"):
            return self._fused_sum(node, name, positional, named)
        if name in self.facts.functions:
            value = self._follow(self.facts.functions[name], node, None, positional, named)
            if value is not None:
                return value
        if name in self.facts.classes:
            self._initialize_in_place(name)
            return self._record(self._make("instance", node, named, tuple(positional), self.facts.classes[name]))
        if name in ("copy.deepcopy", "copy.copy") and positional:
            return positional[0]
        if name == "map" and len(positional) == 2 and isinstance(positional[0].value, ast.Lambda):
            return self._mapped(positional[0].value, positional[1], node)
        if name in array_frameworks.LINEAR:
            sizes = [*positional, *(named[one] for one in ("units", "features", "out_features") if one in named)]
            return self._record(self._make("call", node, {"out_features": sizes[-1]} if sizes else {}, (), _LINEAR))
        if name in CONSTRUCTORS:
            bound, items = _bind(CONSTRUCTORS[name], positional, named)
            return self._record(self._make("call", node, bound, items, name))
        return self._record(self._make("call", node, named, tuple(positional), name))

    def _fused_sum(self, node: ast.Call, name: str, positional: list[Term], named: dict[str, Term]) -> Term:
        """`baddbmm` and `addmm`, beta · input + alpha · (left · right), as a product, its scale and a sum."""
        arguments, _ = _bind(("input", "left", "right"), positional, named)
        added, left, right = (arguments.get(key) for key in ("input", "left", "right"))
        if added is None or left is None or right is None:
            return self._record(self._make("call", node, named, tuple(positional), name))
        value = self._record(self._make("matmul", node, {"input": left, "other": right}, value=name))
        if "alpha" in arguments:
            value = self._make("mul", node, {"input": value, "other": arguments["alpha"]})
        beta = arguments.get("beta")
        without = beta is not None and beta.op == "constant" and beta.value == 0
        return value if without else self._make("add", node, {"input": value, "other": added})

    def _mapped(self, function: ast.Lambda, iterated: Term, node: ast.AST) -> Term:
        """The results of a lambda of one parameter for each element of a tuple, or for three of another value."""
        count = len(iterated.items) if iterated.op == "tuple" else 3  # query, key and value
        outer, results = self.names, []
        for index in range(count if len(function.args.args) == 1 else 0):
            self.names = {**outer, function.args.args[0].arg: self._element(iterated, index, node)}
            results.append(self._expression(function.body))
        self.names = outer
        return self._make("tuple", node, items=tuple(results))

    def _initialize_in_place(self, name: str) -> None:
        state = self.names, self.function, self.class_, self.loops, self.returned, self.calls
        self.names, self.calls = dict(self.globals), []
        self._initialize(name)
        self.names, self.function, self.class_, self.loops, self.returned, self.calls = state

    def _method(self, node: ast.Call, name: str, base: Term, positional: list[Term], named: dict[str, Term]) -> Term:
        if base.op in ("self", "instance") and isinstance(base.value, ClassFacts):
            return self._own_method(node, name, base, positional, named)
        plain = name[:-1] if name.endswith("_") and not name.startswith("_") else name
        if base.op == "apply" and base.value == "torch.nn.MultiheadAttention":
            plain = name
        if name == "generate_square_subsequent_mask":
            return self._operation("subsequent_mask", node, positional, named, name)
        if self.facts.framework and plain == "astype" and positional:
            return self._record(self._make("cast", node, {"input": base, "dtype": positional[0]}))
        if plain == "transpose" and len(positional) != 2 and positional:
            return self._operation("permute", node, [base, *positional], named, name)
        if self.facts.framework and plain == "repeat":
            return self._operation("repeat_interleave", node, [base, *positional], named, name)
        if plain in METHODS:
            return self._operation(METHODS[plain], node, [base, *positional], named, name)
        if plain == "t" and not positional:
            return self._record(self._make("transpose", node, {"input": base}, value="t"))
        if plain in CASTS:
            dtype = Term("name", node, value=CASTS[plain])
            return self._record(self._make("cast", node, {"input": base, "dtype": dtype}))
        if plain in ("to", "type", "cuda", "cpu", "type_as"):
            return self._conversion(node, base, positional, named)
        if name == "forward":
            return self._apply(node, base, positional, named)
        return self._record(self._make("method", node, {"input": base, **named}, tuple(positional), name))

    def _conversion(self, node: ast.Call, base: Term, positional: list[Term], named: dict[str, Term]) -> Term:
        """`to`, `type` and the like: a cast where a dtype is named, else the tensor itself on another device."""
        candidates = [*positional, *([named["dtype"]] if "dtype" in named else [])]
        for one in candidates:
            if (one.op == "name" and str(one.value).startswith("torch.")) or (
                one.op == "attribute" and one.value == "dtype"
            ):
                return self._record(self._make("cast", node, {"input": base, "dtype": one}))
        return base

    def _own_method(
        self, node: ast.Call, name: str, base: Term, positional: list[Term], named: dict[str, Term]
    ) -> Term:
        """A call of `self.name(...)`: a method of the class, or a module that its constructor made."""
        class_: ClassFacts = base.value
        stored = self.names.get(f"self.{name}") or class_.attributes.get(name)
        if stored is not None:
            return self._apply(node, stored, positional, named)
        if name in class_.methods:
            value = self._follow(class_.methods[name], node, base, positional, named)
            if value is not None:
                return value
        if name == "register_buffer" and len(positional) < 2 and "tensor" in named:
            positional = [*positional, named["tensor"]]
        return self._record(self._make("method", node, {"input": base, **named}, tuple(positional), name))

    def _apply(self, node: ast.Call, module: Term, positional: list[Term], named: dict[str, Term]) -> Term:
        """A call of a value: of a module of torch, or of a module of this file, whose `forward` is followed."""
        run = next(
            (one for one in self._forward_names if module.op == "instance" and one in module.value.methods), None
        )
        if run is not None:
            value = self._follow(module.value.methods[run], node, module, positional, named)
            if value is not None:
                return value
        name = module.value if module.op in ("call", "name") else label_of_class(module)
        if name == "torch.nn.Softmax":
            arguments = {"input": positional[0], "dim": module.get("dim")} if positional else {}
            found = {key: term for key, term in arguments.items() if term is not None}
            return self._record(self._make("softmax", node, found, value="nn.Softmax"))
        if name in ("torch.nn.Dropout", "torch.nn.Identity") and positional:
            return self._record(self._make("dropout", node, {"input": positional[0]}, value="module"))
        if name in array_frameworks.LAYERS:
            arguments = array_frameworks.layer_arguments(str(name), positional, named, node, self._make)
            return self._record(self._make("apply", node, {**arguments, "module": module}, (), name))
        parameters = FORWARD.get(str(name), ("input", "*rest"))
        arguments, items = _bind(parameters, positional, named)
        return self._record(self._make("apply", node, {**arguments, "module": module}, items, name))

    def _operation(self, op: str, node: ast.Call, positional: list[Term], named: dict[str, Term], spelled: str) -> Term:
        if op in ("contiguous",) and positional:
            return positional[0]
        named = {_KEYWORDS.get(key, key): term for key, term in named.items()}
        if op == "softmax" and "." not in spelled and len(positional) == 3:  # the method has no `_stacklevel`
            named["dtype"] = positional.pop()
        if op == "softmax" and spelled == "torch.softmax" and len(positional) == 3:
            named["dtype"] = positional.pop()
        if op == "size" and len(positional) == 1 and "dim" not in named:
            return self._make("shape", node, {"input": positional[0]})
        arguments, items = _bind(PARAMETERS.get(op) or array_frameworks.PARAMETERS[op], positional, named)
        if op == "size":
            dim = _integer(arguments.get("dim"))
            return self._make("size", node, {"input": arguments["input"]}, value=dim)
        if len(items) == 1 and items[0].op == "tuple":
            items = items[0].items
        return self._record(self._make(op, node, arguments, items, spelled))


def _is_flag(default: ast.expr) -> bool:
    """Whether a default is True or False: other callers choose otherwise, so both branches count."""
    return isinstance(default, ast.Constant) and isinstance(default.value, bool)


def label_of_class(module: Term) -> str | None:
    """The name of the class of this file that a module is an instance of."""
    return module.value.name if module.op == "instance" else None


def _integer(term: Term | None) -> int | None:
    if term is None:
        return None
    if term.op == "constant" and isinstance(term.value, int):
        return term.value
    if term.op == "negative" and term.input.op == "constant" and isinstance(term.input.value, int):
        return -term.input.value
    return None


def _bind(
    parameters: tuple[str, ...], positional: list[Term], named: dict[str, Term]
) -> tuple[dict[str, Term], tuple[Term, ...]]:
    """Arguments by their parameters' names, and the rest of the positional ones."""
    plain = [name for name in parameters if not name.startswith("*")]
    bound = dict(zip(plain, positional, strict=False))
    bound.update({name: term for name, term in named.items() if name not in bound})
    return bound, tuple(positional[len(plain) :])


def _canonical(name: str) -> str:
    """A qualified name by the shortest public path that the tables know."""
    for prefix, public in (
        ("torch.nn.modules.activation.", "torch.nn."),
        ("torch.nn.modules.", "torch.nn."),
        ("torch.nn.attention.flex_attention.", "torch.nn.attention.flex_attention."),
    ):
        if name.startswith(prefix):
            return public + name[len(prefix) :]
    return array_frameworks.public_name(name)
