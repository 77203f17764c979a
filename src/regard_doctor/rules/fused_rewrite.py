"""The rewrite of the textbook formula to one call of a fused function, where it is proven to compute the same."""

from __future__ import annotations

import ast
import math
from dataclasses import astuple, dataclass

from ..attention_sites import Step, WrittenFormula, dimension_power, equation_axes
from ..mask_values import hidden_triangle, mask_values
from ..module_facts import ModuleFacts
from ..python_syntax import below, code_of, names_below
from ..rewriting import RemoveStatement, ReplaceExpression, Rewrite
from ..term import ABSENT, Term, is_none, walk
from .mask_uses import fill_value


def formula_terms(site: WrittenFormula) -> list[Term]:
    """The operations of a formula, from the scores to the weights that are multiplied by the values."""
    before, after = ([step.term for step in steps] for steps in (site.before, site.after))
    return [site.scores.term, *before, site.softmax, *after]


@dataclass(frozen=True, slots=True)
class FusedCall:
    """The arguments of the fused call, as source code; a mask by `keep` (True attends) or by `bias` (added)."""

    query: str
    key: str
    value: str
    keep: str = ""
    bias: str = ""
    optional: str = ""
    causal: bool = False
    dropout: str = ""
    scale: str = ""

    def as_sdpa(self, function: str) -> str:
        """The call of torch's function."""
        mask = self._if_given(self.keep or self.bias)
        return self._call(function, attn_mask=mask, dropout_p=self.dropout, is_causal="True" if self.causal else "")

    def as_regard(self) -> str:
        """The call of `regard.attention`."""
        keep = f"regard.masks.where(keep={self.keep})" if self.keep else ""
        mask = self._if_given("regard.masks.causal()" if self.causal else keep)
        return self._call("regard.attention", mask=mask, bias=self._if_given(self.bias), dropout_p=self.dropout)

    def _if_given(self, mask: str) -> str:
        conditional = mask and self.optional and mask != self.optional
        return f"None if {self.optional} is None else {mask}" if conditional else mask

    def _call(self, function: str, **options: str) -> str:
        written = [self.query, self.key, self.value]
        written += [f"{name}={code}" for name, code in (options | {"scale": self.scale}).items() if code]
        return f"{function}({', '.join(written)})"


class _NotProven(Exception):
    """The formula cannot be rewritten with certainty."""


def fused_rewrite(site: WrittenFormula, facts: ModuleFacts) -> Rewrite | None:
    """The rewrite of a formula to one call of a fused function; None where it is not proven to compute the same."""
    try:
        return _Rewriter(site, facts).rewrite()
    except _NotProven:
        return None


def _require(proven: object) -> None:
    if not proven:
        raise _NotProven


class _Rewriter:
    """Writes the fused call for one site, and collects the statements that it makes superfluous."""

    def __init__(self, site: WrittenFormula, facts: ModuleFacts) -> None:
        self.site, self.facts = site, facts
        self.final = self._statement(site.node)
        self.names = list(below(site.event.function, ast.Name))
        self.removed: list[ast.stmt] = []

    def rewrite(self) -> Rewrite:
        """The rewrite, for torch's function; `--to regard` replaces the call."""
        _require(self.site.event.function is not None and isinstance(self.site.node, ast.expr))
        _require(isinstance(self.final, ast.Return | ast.Assign))
        self._collect_statements()
        self._check_dtypes()
        call = FusedCall(*self._operands(), **self._mask(), dropout=self._dropout(), scale=self._scale())
        self._check_names(call)
        function, imports = self._sdpa_name()
        edits = [RemoveStatement(statement) for statement in self.removed]
        code = call.as_sdpa(function)
        return Rewrite((*edits, ReplaceExpression(self.site.node, code)), imports, call.as_regard())

    def _check_dtypes(self) -> None:
        """Scores and weights are in float32 between two casts, if there are any: fused functions compute so too."""
        softmax = self.site.softmax["dtype"]
        raised = [step.term["dtype"] for step in self.site.before if step.op == "cast"]
        raised += [] if is_none(softmax) else [softmax]
        lowered = [step.term["dtype"] for step in self.site.after if step.op == "cast"]
        _require(all(dtype.value == "torch.float32" for dtype in raised))
        _require(all(dtype.op == "attribute" for dtype in lowered) and (lowered or not raised))

    # Statements

    def _statement(self, node: ast.AST) -> ast.stmt:
        found = self.facts.statement_around(node)
        if found is None:
            raise _NotProven
        return found

    def _collect_statements(self) -> None:
        """Find the assignments of scores and weights: of plain names, in one block, or under `if mask is not None`."""
        above, names = self.facts.parents[self.final], set()
        blocks = (getattr(above, name, None) for name in ("body", "orelse"))
        block = next((one for one in blocks if isinstance(one, list) and self.final in one), [])
        for term in formula_terms(self.site):
            statement = self._statement(term.node)
            if statement is self.final or statement in self.removed:
                continue
            names.add(_target(statement))
            outer = self.facts.parents[statement]
            if isinstance(outer, ast.If) and len(outer.body) == 1 and not outer.orelse:
                statement = outer
            _require(statement in block)
            if statement not in self.removed:
                self.removed.append(statement)
        self._check_uses(names)

    def _inside(self) -> set[int]:
        """The nodes of what is removed."""
        return {id(node) for statement in self.removed for node in ast.walk(statement)}

    def _check_uses(self, names: set[str]) -> None:
        """The names of scores and weights are used in what is removed or replaced alone."""
        inside = self._inside() | {id(node) for node in ast.walk(self.site.node)}
        targets = self.final.targets if isinstance(self.final, ast.Assign) else []
        rebound = {one.id for one in targets if isinstance(one, ast.Name)}
        for node in self.names:
            if node.id in names and id(node) not in inside:
                bound_by_final = isinstance(node.ctx, ast.Store) and self._statement(node) is self.final
                is_later = node.lineno > (self.final.end_lineno or 0) and node.id in rebound  # of another value
                _require(bound_by_final or is_later)

    def _check_names(self, call: FusedCall) -> None:
        """No name in the new call is bound between where it was used and where the call stands."""
        first = min((statement.lineno for statement in self.removed), default=self.final.lineno)
        codes = (one for one in astuple(call) if isinstance(one, str) and one)
        used = {name for code in codes for name in names_below(ast.parse(code, mode="eval"))}
        between = (node for node in self.names if first <= node.lineno < self.final.lineno)
        bound = {node.id for node in between if isinstance(node.ctx, ast.Store)}
        _require(not used & bound.union(*(names_below(statement, ast.Store) for statement in self.removed)))

    # Arguments

    def _operands(self) -> tuple[str, str, str]:
        scores, weighted = self.site.scores.term, self.site.weighted.term
        if scores.op == "einsum":
            _check_einsum(scores, transposed=True)
            key = ast.unparse(_written(scores, 1))
        else:
            key = _untransposed(scores)
        if weighted.op == "einsum":
            _check_einsum(weighted, transposed=False)
        return ast.unparse(_written(scores, 0)), key, ast.unparse(_written(weighted, 1))

    def _mask(self) -> dict:
        steps = [step for step in self.site.before if step.op in ("masked_fill", "where", "setitem", "add")]
        if not steps:
            return {}
        step = steps[0]
        _require(len(steps) == 1 and step.op not in ("where", "setitem") and step.operand is not None)
        if step.conditional:
            return {**_tensor_mask(step), "optional": self._tested(step)}
        values, fill = mask_values(step.operand), fill_value(step.term.get("value"))
        filled = step.op == "masked_fill" and fill is not None and fill <= -1e9
        added = step.op == "add" and values is not None and {*values.flatten().tolist()} == {0.0, -math.inf}
        hidden = hidden_triangle(step.operand or ABSENT, true_hides=True, as_booleans=filled)
        return {"causal": True} if (filled or added) and hidden == "future" else _tensor_mask(step)

    def _tested(self, step: Step) -> str:
        """The code of what has to be no None for a mask to be used, `if mask is not None`."""
        match self.facts.parents[self._statement(step.term.node)]:
            case ast.If(
                test=ast.Compare(left=tested, ops=[ast.IsNot(), *_], comparators=[ast.Constant(value=None), *_])
            ):
                return ast.unparse(tested)
        raise _NotProven

    def _dropout(self) -> str:
        steps = [step for step in self.site.after if step.op == "dropout"]
        if not steps:
            return ""
        call = steps[0].term.node
        _require(len(steps) == 1 and not steps[0].conditional)
        if not isinstance(call, ast.Call):
            raise _NotProven
        if steps[0].term.value == "module":
            return self._module_dropout(call.func)
        written = {one.arg: ast.unparse(one.value) for one in call.keywords}
        written |= dict(zip(("input", "p", "training"), map(ast.unparse, call.args), strict=False))
        probability, training = written.get("p", "0.5"), written.get("training")
        return f"{probability} if {training} else 0.0" if training else probability

    def _module_dropout(self, function: ast.expr) -> str:
        """The probability of a dropout layer that is an attribute of `self`."""
        class_ = self.site.event.class_
        name = function.attr if isinstance(function, ast.Attribute) and code_of(function.value) == "self" else ""
        made = class_.attributes.get(name) if class_ is not None else None
        _require(made is not None and made.value == "torch.nn.Dropout")
        return f"self.{name}.p if self.training else 0.0"

    def _scale(self) -> str:
        steps = [step for step in self.site.before if step.op in ("mul", "div")]
        if not steps:
            return "1.0"
        step = steps[0]
        operand = step.operand or ABSENT
        power = dimension_power(operand)
        _require(len(steps) == 1 and not step.conditional and not _is_tensor(operand))
        if power is None:
            raise _NotProven
        exponent = power.power if step.op == "mul" else -power.power
        if exponent == -0.5 and power.dimension is not None and self._is_last_axis(power.dimension):
            return ""
        written = _written_operand(step)
        return ast.unparse(written) if step.op == "mul" else f"1 / {_as_operand(written)}"

    def _is_last_axis(self, dimension: Term) -> bool:
        """Whether a dimension is the size of the last axis of the query or of the key."""
        if dimension.op != "size" or dimension.value != -1:
            return False
        is_einsum, key = self.site.scores.term.op == "einsum", self.site.key
        of_key = key if is_einsum else key.input if key.op == "transpose" else None
        return dimension.input is self.site.query or dimension.input is of_key

    def _sdpa_name(self) -> tuple[str, tuple[str, ...]]:
        known = {module: name for name, module in reversed(self.facts.imports.items())}
        for module, path in (("torch.nn.functional", ""), ("torch", ".nn.functional")):
            if module in known:
                return f"{known[module]}{path}.scaled_dot_product_attention", ()
        return "torch.nn.functional.scaled_dot_product_attention", ("torch",)


def _target(statement: ast.stmt) -> str:
    """The name that an assignment, plain, augmented or by a method in place, binds."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AugAssign(target=ast.Name(id=name)):
            return name
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method))) if method[-1] == "_":
            return name
    raise _NotProven


def _written(term: Term, index: int) -> ast.expr:
    """An operand of a product, by its position, as the product spells it."""
    match term.node:
        case ast.BinOp(left=left, right=right):
            return (left, right)[index]
        case ast.Call(func=function, args=written, keywords=[]):
            if term.op == "einsum":
                written = [one for one in written if not (isinstance(one, ast.Constant) and isinstance(one.value, str))]
                if len(written) == 1 and isinstance(written[0], ast.Tuple | ast.List):
                    written = written[0].elts
            elif isinstance(function, ast.Attribute) and len(written) == 1:
                written = [function.value, *written]
            if len(written) == 2:
                return written[index]
    raise _NotProven


def _check_einsum(term: Term, *, transposed: bool) -> None:
    """The equation is "... i d, ... j d -> ... i j", or "... i j, ... j d -> ... i d"."""
    axes = equation_axes(term)
    if axes is None or min(map(len, axes)) < 3:
        raise _NotProven
    left, right, out = axes
    other, summed = (right[-2], right[-1]) if transposed else (right[-1], right[-2])
    _require(left[:-2] == right[:-2] and out == [*left[:-1], other] and left[-1] == summed)


def _untransposed(scores: Term) -> str:
    """The key, where its transpose is written in the product, or assigned to a name on its own line before."""
    written = _written(scores, 1)
    match written:
        case ast.Attribute(value=key, attr="mT"):
            return ast.unparse(key)
        case ast.Call(func=ast.Attribute(value=key, attr="transpose")):
            pair = sorted(map(ast.unparse, written.args))
            if pair in (["-1", "-2"], ["2", "3"]) or (pair == ["1", "2"] and "bmm" in str(scores.value)):
                return ast.unparse(key)
    return f"{_as_operand(written)}.transpose(-2, -1)"


def _tensor_mask(step: Step) -> dict:
    if step.op == "add":
        return {"bias": ast.unparse(_written_operand(step))}
    value = step.term["value"]
    _require(fill_value(value) == -math.inf and not any("finfo" in str(one.value) for one in walk(value)))
    match step.term.node:
        case ast.Call(func=ast.Attribute(), args=[mask, _]):
            return {"keep": _negated(mask)}
    raise _NotProven


def _written_operand(step: Step) -> ast.expr:
    """The other operand of a step, as the source spells it."""
    match step.term.node:
        case ast.AugAssign(value=value):
            return value
        case ast.BinOp(left=left, right=right):
            return left if step.operand is step.term["input"] else right
    raise _NotProven


def _is_tensor(scale: Term) -> bool:
    """Whether a scale is a tensor, which the fused functions do not take."""
    made = walk(scale, stop=frozenset({"size", "shape"}))
    return any(one.op == "cast" or str(one.value).startswith("torch.") for one in made)


def _negated(mask: ast.expr) -> str:
    """The code of the opposite of a mask."""
    match mask:
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() as op]):
            other = ast.NotEq() if isinstance(op, ast.Eq) else ast.Eq()
            return ast.unparse(ast.Compare(mask.left, [other], mask.comparators))
        case ast.UnaryOp(op=ast.Invert(), operand=inverted):
            return ast.unparse(inverted)
    return f"~{_as_operand(mask)}"


def _as_operand(node: ast.expr) -> str:
    """The code of an expression, in parentheses where an operator or an attribute behind it needs them."""
    simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return ast.unparse(node) if simple else f"({ast.unparse(node)})"
