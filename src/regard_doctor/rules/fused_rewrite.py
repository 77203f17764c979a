"""The rewrite of the textbook formula to one call of a fused function, where it is proven to compute the same."""

from __future__ import annotations

import ast
import math
from dataclasses import astuple, dataclass

from ..attention_sites import AttentionSite, Step, dimension_power, equation_axes
from ..mask_values import hidden_pairs, mask_values, triangle
from ..module_facts import ModuleFacts
from ..rewriting import RemoveStatement, ReplaceExpression, Rewrite
from ..term import Term, is_none, walk
from .base import names_below, statement_around
from .mask_uses import fill_value


def formula_terms(site: AttentionSite) -> list[Term]:
    """The operations of a formula, from the scores to the weights that are multiplied by the values."""
    inner = [site.scores.term] if site.scores else []
    softmax = [site.softmax] if site.softmax else []
    return [*inner, *(step.term for step in site.before), *softmax, *(step.term for step in site.after)]


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
        mask = self.keep or self.bias
        if mask and self.optional and mask != self.optional:
            mask = f"None if {self.optional} is None else {mask}"
        options = {"attn_mask": mask, "dropout_p": self.dropout, "is_causal": "True" if self.causal else ""}
        return self._call(function, options)

    def as_regard(self) -> str:
        """The call of `regard.attention`."""
        keep = f"regard.masks.where(keep={self.keep})" if self.keep else ""
        keep = "regard.masks.causal()" if self.causal else keep
        mask, bias = (
            f"None if {self.optional} is None else {one}" if one and self.optional and one != self.optional else one
            for one in (keep, self.bias)
        )
        return self._call("regard.attention", {"mask": mask, "bias": bias, "dropout_p": self.dropout})

    def _call(self, function: str, options: dict[str, str]) -> str:
        written = [self.query, self.key, self.value]
        written += [f"{name}={code}" for name, code in (options | {"scale": self.scale}).items() if code]
        return f"{function}({', '.join(written)})"


class _NotProven(Exception):
    """The formula cannot be rewritten with certainty."""


def fused_rewrite(site: AttentionSite, facts: ModuleFacts) -> Rewrite | None:
    """The rewrite of a formula to one call of a fused function; None where it is not proven to compute the same."""
    try:
        return _Rewriter(site, facts).rewrite()
    except _NotProven:
        return None


class _Rewriter:
    """Writes the fused call for one site, and collects the statements that it makes superfluous."""

    def __init__(self, site: AttentionSite, facts: ModuleFacts) -> None:
        self.site, self.facts, self.above = site, facts, facts.parents
        self.final = self._statement(site.output.node)
        self.function = site.event.function
        self.removed: list[ast.stmt] = []

    def rewrite(self) -> Rewrite:
        """The rewrite, for torch's function; `--to regard` replaces the call."""
        output = self.site.output.node
        if (
            self.function is None
            or not isinstance(output, ast.expr)
            or not isinstance(self.final, ast.Return | ast.Assign)
        ):
            raise _NotProven
        self._collect_statements()
        self._check_dtypes()
        call = FusedCall(*self._operands(), **self._mask(), dropout=self._dropout(), scale=self._scale())
        self._check_names(call)
        function, imports = self._sdpa_name()
        edits = [RemoveStatement(statement) for statement in self.removed]
        code = call.as_sdpa(function)
        return Rewrite((*edits, ReplaceExpression(output, code)), imports, call.as_regard())

    def _check_dtypes(self) -> None:
        """Scores and weights are in float32 between two casts, if there are any: fused functions compute so too."""
        softmax = self.site.softmax.get("dtype") if self.site.softmax else None
        raised = [step.term.get("dtype") for step in self.site.before if step.op == "cast"]
        raised += [] if is_none(softmax) else [softmax]
        lowered = [step.term.get("dtype") for step in self.site.after if step.op == "cast"]
        if any(dtype is None or dtype.value != "torch.float32" for dtype in raised):
            raise _NotProven
        if any(dtype is None or dtype.op != "attribute" for dtype in lowered) or (raised and not lowered):
            raise _NotProven

    # Statements

    def _statement(self, node: ast.AST) -> ast.stmt:
        found = statement_around(node, self.facts)
        if found is None:
            raise _NotProven
        return found

    def _collect_statements(self) -> None:
        """Find the assignments of scores and weights: of plain names, in one block, or under `if mask is not None`."""
        block = self._block(self.final)
        names = set()
        for term in formula_terms(self.site):
            statement = self._statement(term.node)
            if statement is self.final or statement in self.removed:
                continue
            outer = self.above[statement]
            if isinstance(outer, ast.If) and outer in block:
                if len(outer.body) != 1 or outer.orelse:
                    raise _NotProven
                names.add(self._target(statement))
                statement = outer
                if statement in self.removed:
                    continue
            elif statement in block:
                names.add(self._target(statement))
            else:
                raise _NotProven
            self.removed.append(statement)
        self._check_uses(names)

    def _block(self, statement: ast.stmt) -> list[ast.stmt]:
        outer = self.above[statement]
        for name in ("body", "orelse"):
            block = getattr(outer, name, None)
            if isinstance(block, list) and statement in block:
                return block
        raise _NotProven

    def _target(self, statement: ast.stmt) -> str:
        """The name that an assignment binds, a plain or an augmented one."""
        if (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            return statement.targets[0].id
        if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            return statement.target.id
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and function.attr.endswith("_")
            ):
                return function.value.id
        raise _NotProven

    def _check_uses(self, names: set[str]) -> None:
        """The names of scores and weights are used in what is removed or replaced alone."""
        inside = {id(node) for statement in self.removed for node in ast.walk(statement)}
        inside |= {id(node) for node in ast.walk(self.site.output.node)}
        targets = self.final.targets if isinstance(self.final, ast.Assign) else []
        rebound = {one.id for one in targets if isinstance(one, ast.Name)}
        for node in ast.walk(self.function or self.facts.tree):
            if isinstance(node, ast.Name) and node.id in names and id(node) not in inside:
                bound_by_final = isinstance(node.ctx, ast.Store) and self._statement(node) is self.final
                is_later = node.lineno > (self.final.end_lineno or 0) and node.id in rebound  # of another value
                if not bound_by_final and not is_later:
                    raise _NotProven

    def _check_names(self, call: FusedCall) -> None:
        """No name in the new call is bound between where it was used and where the call stands."""
        first = min((statement.lineno for statement in self.removed), default=self.final.lineno)
        codes = (one for one in astuple(call) if isinstance(one, str) and one)
        used = {name for code in codes for name in names_below(ast.parse(code, mode="eval"))}
        inside = {id(node) for statement in self.removed for node in ast.walk(statement)}
        if any(used & names_below(statement, ast.Store) for statement in self.removed):
            raise _NotProven
        for node in ast.walk(self.function or self.facts.tree):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store) or node.id not in used:
                continue
            if id(node) not in inside and first <= node.lineno < self.final.lineno:
                raise _NotProven

    def _code(self, node: ast.AST) -> str:
        """The source of an expression, on one line."""
        if not isinstance(node, ast.expr):
            raise _NotProven
        return ast.unparse(node)

    # Arguments

    def _written(self, term: Term, index: int) -> str:
        """The source of an operand of a product, by its position: as the product spells it."""
        product = term.node
        if isinstance(product, ast.BinOp):
            return self._code(product.left if index == 0 else product.right)
        if isinstance(product, ast.Call):
            written = list(product.args)
            if term.op == "einsum":
                written = [one for one in written if not (isinstance(one, ast.Constant) and isinstance(one.value, str))]
                if len(written) == 1 and isinstance(written[0], ast.Tuple | ast.List):
                    written = written[0].elts
            elif isinstance(product.func, ast.Attribute) and len(written) == 1:
                written = [product.func.value, *written]
            if len(written) == 2 and not product.keywords:
                return self._code(written[index])
        raise _NotProven

    def _operands(self) -> tuple[str, str, str]:
        scores, weighted = self.site.scores, self.site.weighted
        if scores is None or weighted is None:
            raise _NotProven
        if scores.term.op == "einsum":
            self._check_einsum(scores.term, transposed=True)
            key = self._written(scores.term, 1)
        else:
            key = self._untransposed(scores.term)
        if weighted.term.op == "einsum":
            self._check_einsum(weighted.term, transposed=False)
        return self._written(scores.term, 0), key, self._written(weighted.term, 1)

    def _check_einsum(self, term: Term, *, transposed: bool) -> None:
        """The equation is "... i d, ... j d -> ... i j", or "... i j, ... j d -> ... i d"."""
        axes = equation_axes(term)
        if axes is None or min(map(len, axes)) < 3:
            raise _NotProven
        left, right, out = axes
        expected = [*left[:-2], left[-2], right[-2] if transposed else right[-1]]
        summed = (left[-1], right[-1] if transposed else right[-2])
        if left[:-2] != right[:-2] or out != expected or summed[0] != summed[1]:
            raise _NotProven

    def _untransposed(self, scores: Term) -> str:
        """The key, where its transpose is written in the product, or assigned to a name on its own line before."""
        code = self._written(scores, 1)
        node = ast.parse(code, mode="eval").body
        if isinstance(node, ast.Attribute) and node.attr == "mT":
            return ast.unparse(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "transpose":
            pair = [ast.unparse(one) for one in node.args]
            if sorted(pair) == ["-1", "-2"] or (pair in (["2", "3"], ["3", "2"])):
                return ast.unparse(node.func.value)
            if sorted(pair) == ["1", "2"] and "bmm" in str(scores.value):
                return ast.unparse(node.func.value)
        simple = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return f"{code}.transpose(-2, -1)" if simple else f"({code}).transpose(-2, -1)"

    def _mask(self) -> dict:
        steps = [step for step in self.site.before if step.op in ("masked_fill", "where", "setitem", "add")]
        if not steps:
            return {}
        if len(steps) > 1 or steps[0].op in ("where", "setitem") or steps[0].operand is None:
            raise _NotProven
        step = steps[0]
        if step.conditional:
            return self._optional_mask(step)
        values = mask_values(step.operand)
        if values is not None and step.op == "masked_fill" and triangle(values.astype(bool)) == "future":
            fill = fill_value(step.term.get("value"))
            if fill is not None and fill <= -1e9:
                return {"causal": True}
        if values is not None and step.op == "add" and set(values.flatten().tolist()) == {0.0, -math.inf}:
            hidden = hidden_pairs(values, true_hides=False)
            return {"causal": True} if triangle(hidden) == "future" else self._tensor_mask(step)
        return self._tensor_mask(step)

    def _optional_mask(self, step: Step) -> dict:
        """A mask that is used `if mask is not None`."""
        test = next((self.above[one] for one in [self._statement(step.term.node)]), None)
        if not isinstance(test, ast.If) or not isinstance(test.test, ast.Compare):
            raise _NotProven
        compared = test.test
        if not isinstance(compared.ops[0], ast.IsNot) or ast.unparse(compared.comparators[0]) != "None":
            raise _NotProven
        return {**self._tensor_mask(step), "optional": self._code(compared.left)}

    def _tensor_mask(self, step: Step) -> dict:
        node = step.term.node
        if step.op == "add":
            if isinstance(node, ast.AugAssign):
                return {"bias": self._code(node.value)}
            if not isinstance(node, ast.BinOp):
                raise _NotProven
            left = step.operand is step.term.get("input")
            return {"bias": self._code(node.left if left else node.right)}
        fill = fill_value(step.term.get("value"))
        if fill != -math.inf or _is_lowest(step.term.get("value")) or not isinstance(node, ast.Call):
            raise _NotProven
        written = node.args[0] if isinstance(node.func, ast.Attribute) and len(node.args) == 2 else None
        if written is None:
            raise _NotProven
        return {"keep": _negated(written)}

    def _dropout(self) -> str:
        steps = [step for step in self.site.after if step.op == "dropout"]
        if not steps:
            return ""
        if len(steps) > 1 or steps[0].conditional or not isinstance(steps[0].term.node, ast.Call):
            raise _NotProven
        term = steps[0].term
        if term.value == "module":
            return self._module_dropout(term)
        call = term.node
        if not isinstance(call, ast.Call):
            raise _NotProven
        written = {one.arg: self._code(one.value) for one in call.keywords}
        written |= dict(zip(("input", "p", "training"), map(self._code, call.args), strict=False))
        probability, training = written.get("p", "0.5"), written.get("training")
        return f"{probability} if {training} else 0.0" if training else probability

    def _module_dropout(self, term: Term) -> str:
        """The probability of a dropout layer that is an attribute of `self`."""
        function = term.node.func if isinstance(term.node, ast.Call) else None
        class_ = self.site.event.class_
        if not isinstance(function, ast.Attribute) or class_ is None or ast.unparse(function.value) != "self":
            raise _NotProven
        made = class_.attributes.get(function.attr)
        if made is None or made.value != "torch.nn.Dropout":
            raise _NotProven
        return f"{ast.unparse(function)}.p if self.training else 0.0"

    def _scale(self) -> str:
        steps = [step for step in self.site.before if step.op in ("mul", "div")]
        if not steps:
            return "1.0"
        if len(steps) > 1 or steps[0].conditional or steps[0].operand is None:
            raise _NotProven
        step = steps[0]
        operand, power = step.operand, dimension_power(step.operand) if step.operand else None
        if operand is None or power is None or _is_tensor(operand):
            raise _NotProven
        exponent = power.power if step.op == "mul" else -power.power
        if exponent == -0.5 and power.dimension is not None and self._is_last_axis(power.dimension):
            return ""
        node = step.term.node
        if isinstance(node, ast.AugAssign):
            written = self._code(node.value)
        elif isinstance(node, ast.BinOp):
            written = self._code(node.left if operand is step.term.get("input") else node.right)
        else:
            raise _NotProven
        simple = isinstance(ast.parse(written, mode="eval").body, ast.Name | ast.Attribute | ast.Call | ast.Constant)
        if step.op == "mul":
            return written
        return f"1 / {written}" if simple else f"1 / ({written})"

    def _is_last_axis(self, dimension: Term) -> bool:
        """Whether a dimension is the size of the last axis of the query or of the key."""
        scores = self.site.scores
        if dimension.op != "size" or dimension.value != -1 or scores is None:
            return False
        key = self.site.key.input if self.site.key.op == "transpose" and scores.term.op == "matmul" else self.site.key
        return (
            dimension.input is self.site.query
            or (dimension.input is key and key is not self.site.key)
            or (scores.term.op == "einsum" and dimension.input is key)
        )

    def _sdpa_name(self) -> tuple[str, tuple[str, ...]]:
        imports = self.facts.imports
        for name, module in imports.items():
            if module == "torch.nn.functional":
                return f"{name}.scaled_dot_product_attention", ()
        for name, module in imports.items():
            if module == "torch":
                return f"{name}.nn.functional.scaled_dot_product_attention", ()
        return "torch.nn.functional.scaled_dot_product_attention", ("torch",)


def _is_tensor(scale: Term) -> bool:
    """Whether a scale is a tensor, which the fused functions do not take."""
    return any(
        one.op == "cast" or str(one.value).startswith("torch.")
        for one in walk(scale, stop=frozenset({"size", "shape"}))
    )


def _is_lowest(value: Term | None) -> bool:
    return value is not None and any("finfo" in str(one.value) for one in walk(value))


def _negated(mask: ast.expr) -> str:
    """The code of the opposite of a mask."""
    if isinstance(mask, ast.Compare) and len(mask.ops) == 1 and isinstance(mask.ops[0], ast.Eq | ast.NotEq):
        op = ast.NotEq() if isinstance(mask.ops[0], ast.Eq) else ast.Eq()
        return ast.unparse(ast.Compare(mask.left, [op], mask.comparators))
    if isinstance(mask, ast.UnaryOp) and isinstance(mask.op, ast.Invert):
        return ast.unparse(mask.operand)
    written = ast.unparse(mask)
    return f"~{written}" if isinstance(mask, ast.Name | ast.Attribute | ast.Call | ast.Subscript) else f"~({written})"
