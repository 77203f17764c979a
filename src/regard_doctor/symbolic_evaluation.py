"""Symbolic evaluation of one module: follows assignments, branches, loops and helpers, and runs nothing.

Each function is evaluated statement by statement; its names stand for `Term`s. Where two branches disagree, a name
stands for the choice of both. Helper functions, methods and modules of the same file are evaluated in place at their
calls, three deep. Everything that is called is recorded, with the loops, the function and the class around it.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Sequence
from functools import reduce

from .call_evaluation import CallEvaluation
from .expression_evaluation import OPERATORS, loop_names
from .module_facts import ClassFacts, Loop, ModuleFacts, indexed
from .python_syntax import Function, defaults_of, parameters
from .term import Term, is_none

_DEEPEST = 3
"""Calls of helpers within calls of helpers that are followed."""
_LONGEST_FUNCTION = 300
"""Lines of a helper that is followed."""


def evaluate(source: str, tree: ast.Module | None = None) -> ModuleFacts:
    r"""Evaluate a module.

    Raises:
        SyntaxError: the source is no Python of this interpreter's version.

    >>> facts = evaluate("def f(q, k):\n    s = q @ k.mT\n    return s.softmax(-1)")
    >>> [event.term.op for event in facts.events]
    ['transpose', 'matmul', 'softmax', 'return']
    """
    facts = indexed(tree or ast.parse(source), source)
    _Evaluator(facts).module()
    return facts


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """Names that statements bind, those of loops and branches in them too."""
    nodes = (node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name | ast.Attribute))
    return {ast.unparse(node) for node in nodes if isinstance(node.ctx, ast.Store)}


class _Returned(Exception):
    """The rest of a block is not reached."""


class _Evaluator(CallEvaluation):
    """Evaluates the statements of a module, and its functions one at a time."""

    # Functions and classes

    def module(self) -> None:
        """Evaluate the statements of the module, then every class and function."""
        for one in self.facts.tree.body:
            with contextlib.suppress(_Returned):  # a module may raise too
                self._block([] if isinstance(one, Function | ast.ClassDef) else [one])
        self.globals = dict(self.names)
        for name in self.facts.classes:
            self.names = dict(self.globals)
            self._initialize(name)
        methods = [(one, class_) for class_ in self.facts.classes.values() for one in class_.methods.items()]
        functions = [(one, class_) for (name, one), class_ in methods if name != "__init__"]
        for function, class_ in [*functions, *((one, None) for one in self.facts.functions.values())]:
            self.names = dict(self.globals)
            self._standalone(function, class_)

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
        with self._within(names=dict(self.names)):
            if "__init__" in class_.methods:
                self._standalone(class_.methods["__init__"], class_)
                found = {key: term for key, term in self.names.items() if key.startswith("self.")}
                class_.attributes.update({key.removeprefix("self."): term for key, term in found.items()})

    def _standalone(self, function: Function, class_: ClassFacts | None) -> None:
        """Evaluate a function by itself: its parameters may be anything."""
        self.names.update({one.arg: self._parameter(one) for one in parameters(function)} | _rest(function))
        if class_ is not None and function.args.args:
            self.names[function.args.args[0].arg] = Term("self", function, value=class_)
        with self._within(function=function, class_=class_, loops=(), returned=[]):
            self._run(function.body)

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
        if not self.calls:
            self.outermost = self.class_, node
        own = {name: term for name, term in self.names.items() if "." not in name}
        names, class_ = (own, None) if receiver is None else (self.globals, receiver.value)
        results: list[Term] = []
        state = {"class_": class_, "returned": results, "calls": [*self.calls, function]}
        with self._within(names=names | bound, function=function, **state):
            self._run(function.body)
        if not results:
            return Term("constant", node, value=None)
        return reduce(lambda one, other: self._choice(one, other, node), results)

    def _bind_function(
        self, function: Function, receiver: Term | None, positional: list[Term], named: dict[str, Term]
    ) -> dict[str, Term] | None:
        """Parameters and their arguments, defaults included; None where they do not fit."""
        static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
        values = [receiver, *positional] if receiver is not None and not static else positional
        places = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if len(values) > len(places) and function.args.vararg is None:
            return None
        bound = dict(zip(places, values, strict=False))
        defaults = defaults_of(function)
        for parameter in (one for one in parameters(function) if one.arg not in bound):
            name = parameter.arg
            if name in named:
                bound[name] = named[name]
            elif name in defaults and not _is_flag(defaults[name]):
                bound[name] = self._expression(defaults[name])
            else:
                bound[name] = Term("parameter", parameter, value=name)
        return bound | _rest(function)

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

    def _nested_function(self, node: Function) -> None:
        with self._within(names=dict(self.names)):
            self._standalone(node, None)
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
        op = OPERATORS.get(type(node.op), "unknown")
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
        both = one | other
        self.names = {name: self._choice(one.get(name, both[name]), both[name], node) for name in both}

    def _truth(self, test: Term) -> bool | None:
        """Whether a condition holds, where that does not depend on the run."""
        if test.op == "constant" and (test.value is None or isinstance(test.value, bool)):
            return bool(test.value)
        if test.op == "not":
            inner = self._truth(test.input)
            return None if inner is None else not inner
        if test.op == "boolean":
            known, settles = [self._truth(item) for item in test.items], test.value == "or"
            return settles if settles in known else None if None in known else not settles
        if test.op == "is_none" and is_none(test.input):
            return True
        computed = ("matmul", "softmax", "apply", "tril", "triu", "masked_fill", "reshape", "transpose")
        return False if test.op == "is_none" and test.input.op in computed else None

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While) -> None:
        if isinstance(node, ast.While):
            self._expression(node.test)
            loop = Loop(node, frozenset(), None)
        else:
            loop = Loop(node, loop_names(node.target), self._expression(node.iter))
        before = dict(self.names)
        for name in _assigned(node.body) & before.keys() - loop.names:
            self.names[name] = self._make("carried", node, {"input": before[name]}, value=name)
        with self._within(loops=(*self.loops, loop)):
            if not isinstance(node, ast.While):
                self._bind_loop(node.target, loop.iterated, node)
            self._run(node.body)
        self._merge(before, self.names, node)
        self._block(node.orelse)

    def _bind_loop(self, target: ast.expr, iterated: Term | None, node: ast.AST) -> None:
        """Bind the variables of a loop to an element of what is iterated."""
        parts: tuple[Term | None, ...] = ()
        if iterated is not None and iterated.op == "call":
            parts = {"zip": iterated.items, "enumerate": (None, *iterated.items[:1])}.get(iterated.value, ())
        if not isinstance(target, ast.Tuple) or len(parts) != len(target.elts):
            self._assign(target, self._iterated_element(iterated, target))
            return
        for one, part in zip(target.elts, parts, strict=True):
            self._bind_loop(one, part, node)


def _rest(function: Function) -> dict[str, Term]:
    """What `*args` and `**kwargs` of a function stand for."""
    found = (one for one in (function.args.vararg, function.args.kwarg) if one is not None)
    return {one.arg: Term("parameter", one, value=one.arg) for one in found}


def _is_flag(default: ast.expr) -> bool:
    """Whether a default is True or False: other callers choose otherwise, so both branches count."""
    return isinstance(default, ast.Constant) and isinstance(default.value, bool)
