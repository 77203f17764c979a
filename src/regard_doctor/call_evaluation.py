"""Symbolic evaluation of calls: the functions, methods and modules of torch and its kin under one name each."""

from __future__ import annotations

import ast

from . import array_frameworks
from .expression_evaluation import ExpressionEvaluation
from .module_facts import ClassFacts
from .python_syntax import Function
from .term import ABSENT, Term, number
from .torch_signatures import CASTS, CONSTRUCTORS, FORWARD, FUNCTIONS, METHODS, PARAMETERS

_LINEAR = "torch.nn.Linear"
_KEYWORDS = {"k": "diagonal", "axis": "dim", "exponent": "other", "tensor": "input", "mat2": "other"}


class CallEvaluation(ExpressionEvaluation):
    """Evaluates calls: of what the tables know, of lambdas, and of the functions and classes of the file."""

    def _call(self, node: ast.Call) -> Term:
        positional = [self._expression(one) for one in node.args]
        named = {one.arg or "**": self._expression(one.value) for one in node.keywords}
        if isinstance(node.func, ast.Attribute):
            spelled = f"{node.func.value.id}.{node.func.attr}" if isinstance(node.func.value, ast.Name) else ""
            base = self._expression(node.func.value)
            if base.op != "name" and spelled not in self.names:
                return self._method(node, node.func.attr, base, positional, named)
        function = self._expression(node.func)
        if function.op == "name":
            return self._named_call(node, str(function.value), positional, named)
        value = None
        if function.op == "function" and isinstance(function.value, Function):
            value = self._follow(function.value, node, None, positional, named)
        elif function.op == "function" and not named:
            value = self._lambda(function.value, positional)
        return self._apply(node, function, positional, named) if value is None else value

    def _lambda(self, function: ast.Lambda, positional: list[Term]) -> Term | None:
        """The value of a lambda of this many arguments; None where it calls itself or takes others."""
        names = [one.arg for one in function.args.args]
        if len(names) != len(positional) or function in self.lambdas or self.remaining <= 0:
            return None
        bound = dict(zip(names, positional, strict=True))
        with self._within(names={**self.names, **bound}, lambdas=[*self.lambdas, function]):
            return self._expression(function.body)

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
            with self._within(names=dict(self.globals), calls=[]):
                self._initialize(name)
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
        if not arguments.keys() >= {"input", "left", "right"}:
            return self._record(self._make("call", node, named, tuple(positional), name))
        added, left, right = (arguments[key] for key in ("input", "left", "right"))
        value = self._record(self._make("matmul", node, {"input": left, "other": right}, value=name))
        if "alpha" in arguments:
            value = self._make("mul", node, {"input": value, "other": arguments["alpha"]})
        without = number(arguments.get("beta")) == 0
        return value if without else self._make("add", node, {"input": value, "other": added})

    def _mapped(self, function: ast.Lambda, iterated: Term, node: ast.AST) -> Term:
        """The results of a lambda of one parameter for each element of a tuple, or for three of another value."""
        count = len(iterated.items) if iterated.op == "tuple" else 3  # query, key and value
        results = []
        for index in range(count if len(function.args.args) == 1 else 0):
            element = self._element(iterated, index, node)
            with self._within(names={**self.names, function.args.args[0].arg: element}):
                results.append(self._expression(function.body))
        return self._make("tuple", node, items=tuple(results))

    def _method(self, node: ast.Call, name: str, base: Term, positional: list[Term], named: dict[str, Term]) -> Term:
        if base.op in ("self", "instance") and isinstance(base.value, ClassFacts):
            return self._own_method(node, name, base, positional, named)
        plain = name[:-1] if name.endswith("_") and not name.startswith("_") else name
        if base.applies("torch.nn.MultiheadAttention"):
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
        for one in (*positional, named.get("dtype", ABSENT)):
            is_name = one.op == "name" and str(one.value).startswith("torch.")
            if is_name or (one.op == "attribute" and one.value == "dtype"):
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
        methods = module.value.methods if module.op == "instance" else {}
        run = next((methods[one] for one in self._forward_names if one in methods), None)
        value = self._follow(run, node, module, positional, named) if run is not None else None
        if value is not None:
            return value
        name = module.value if module.op in ("call", "name") else module.value.name if module.op == "instance" else None
        if name == "torch.nn.Softmax":
            arguments, _ = _bind(FORWARD[name], positional, named)
            dim = {"dim": module["dim"]} if "dim" in module.arguments else {}
            return self._record(self._make("softmax", node, arguments | dim, value="nn.Softmax"))
        if name in ("torch.nn.Dropout", "torch.nn.Identity", *array_frameworks.DROPOUT) and positional:
            return self._record(self._make("dropout", node, {"input": positional[0]}, value="module"))
        if name in array_frameworks.LAYERS:
            arguments = array_frameworks.layer_arguments(str(name), positional, named, node, self._make)
            return self._record(self._make("apply", node, {**arguments, "module": module}, (), name))
        parameters = FORWARD.get(str(name), ("input", "*rest"))
        arguments, items = _bind(parameters, positional, named)
        return self._record(self._make("apply", node, {**arguments, "module": module}, items, name))

    def _operation(self, op: str, node: ast.Call, positional: list[Term], named: dict[str, Term], spelled: str) -> Term:
        if op == "contiguous" and positional:
            return positional[0]
        named = {_KEYWORDS.get(key, key): term for key, term in named.items()}
        without = "." not in spelled or spelled == "torch.softmax"  # these have no `_stacklevel`
        if op == "softmax" and without and len(positional) == 3:
            named["dtype"] = positional.pop()
        if op == "size" and len(positional) == 1 and "dim" not in named:
            return self._make("shape", node, {"input": positional[0]})
        arguments, items = _bind(PARAMETERS.get(op) or array_frameworks.PARAMETERS[op], positional, named)
        if op == "size":
            dim = number(arguments.get("dim"))
            return self._make("size", node, {"input": arguments["input"]}, value=None if dim is None else int(dim))
        if len(items) == 1 and items[0].op == "tuple":
            items = items[0].items
        return self._record(self._make(op, node, arguments, items, spelled))

    # What the evaluation of functions adds

    def _follow(
        self, function: Function, node: ast.Call, receiver: Term | None, positional: list[Term], named: dict[str, Term]
    ) -> Term | None:
        raise NotImplementedError

    def _initialize(self, name: str) -> None:
        raise NotImplementedError


def _bind(
    parameters: tuple[str, ...], positional: list[Term], named: dict[str, Term]
) -> tuple[dict[str, Term], tuple[Term, ...]]:
    """Arguments by their parameters' names, and the rest of the positional ones."""
    plain = [name for name in parameters if not name.startswith("*")]
    bound = dict(zip(plain, positional, strict=False))
    bound.update({name: term for name, term in named.items() if name not in bound})
    return bound, tuple(positional[len(plain) :])
