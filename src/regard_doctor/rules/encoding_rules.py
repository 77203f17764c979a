"""Rules about rotary tables, linear biases and the feature maps of linear attention."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from ..attention_sites import names_in, product, source_of
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import Function, ModuleFacts
from ..term import HALF, Term, exchanges_middle, is_none, label, number, sides, walk
from .base import Report, around, code_of, function_around, last_name, rule, statement_around
from .position_rules import counts_positions

_SLOPES = re.compile(r"slope|alibi|^m$|^ratios?$", re.I)
_DISTANCES = (
    *("sub", "negative", "abs", "method", "item", "unsqueeze", "cast", "clamp", "carried", "expand", "transpose"),
)


@rule("ATT505", Severity.ERROR)
def rewarded_distance(facts: ModuleFacts) -> Iterator[Report]:
    """The linear bias of ALiBi grows with the distance instead of falling."""
    for node in _rewarding_functions(facts):
        yield Report(node, "this bias is larger for keys farther away: subtract slopes · distance")
    for site in facts.sites:
        biases = [step.operand for step in site.before if step.op == "add"] if site.kind == "formula" else []
        biases += [site.output.get("attn_mask")] if site.kind == "sdpa" else []
        taken = [step.operand for step in site.before if step.op == "sub"]
        for bias, sign in [*((one, 1) for one in biases), *((one, -1) for one in taken)]:
            for one in _summands(bias):
                values = _biased(one)
                if values is not None and bool((sign * np.diff(values[3, :3]) < 0).all()) and _names_slopes(one):
                    yield Report(one.node, "this bias is larger for keys farther away: subtract slopes · distance")


def _rewarding_functions(facts: ModuleFacts) -> Iterator[ast.BinOp]:
    """Sums in functions of (score, batch, head, query, key) that add slope · (query - key)."""
    for function in facts.nodes[ast.FunctionDef]:
        names = [one.arg for one in function.args.args]
        if len(names) != 5 or not re.match(r"score|s$|qk", names[0]):
            continue
        distance = rf"\(?{names[3]} - {names[4]}\)?"
        for node in ast.walk(function):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.right, ast.BinOp):
                product_ = node.right
                sides = [ast.unparse(product_.left), ast.unparse(product_.right)]
                if isinstance(product_.op, ast.Mult) and any(re.fullmatch(distance, side) for side in sides):
                    negated = any(side.startswith("-") for side in sides)
                    if not negated and any(re.match(r"\w*(slope|alibi)|m\[", side, re.I) for side in sides):
                        yield node


def _summands(bias: Term | None) -> Iterator[Term]:
    """The parts of a bias that are added, or of which one is chosen."""
    if bias is None:
        return
    if bias.op == "add":
        for one in bias.operands():
            yield from _summands(one)
    elif bias.op == "choice":
        for one in bias.items:
            yield from _summands(one)
    elif bias.op in ("masked_fill", "cast", "unsqueeze", "item", "expand", "contiguous", "repeat"):
        yield from _summands(bias.input)
    else:
        yield bias


def _names_slopes(term: Term) -> bool:
    return any(_SLOPES.search(label(one)) or one.op == "pow" for one in walk(term))


def _biased(term: Term, depth: int = 12) -> NDArray | None:
    """The values of a bias by distance for four positions, with slopes of 1."""
    values = mask_values(term)
    if values is not None or depth == 0:
        return values.astype(float) if values is not None else None
    if term.op == "mul":
        for slope, distance in sides(term):
            found, sign = _biased(distance, depth - 1), _slope_sign(slope)
            if found is not None and sign:
                return sign * found
        return None
    if "input" not in term.arguments or term.op not in _DISTANCES:
        return None
    inner = _biased(term.input, depth - 1)
    if inner is None or (term.op in ("sub", "transpose")) or (term.op == "method" and term.value != "abs"):
        return None
    if term.op in ("abs", "method"):
        return np.abs(inner)
    if term.op == "clamp":
        least, most = number(term.get("min")), number(term.get("max"))
        return None if least is None and most is None else np.clip(inner, least, most)
    return -inner if term.op == "negative" else inner


def _slope_sign(slope: Term) -> int:
    """The sign of slopes: -1 where they are negated, 1 for a name of slopes or a power, 0 where that is not known."""
    while slope.op in ("item", "unsqueeze", "reshape", "cast", "carried", "expand", "contiguous"):
        if _SLOPES.search(label(slope)) and slope.input.op in ("parameter", "attribute"):
            return 1
        slope = slope.input
    if slope.op == "negative":
        return -_slope_sign(slope.input)
    plain = number(slope)
    if plain is not None:
        return 1 if plain > 0 else -1
    if slope.op == "mul":
        signs = [_slope_sign(one) for one in slope.operands()]
        return signs[0] * signs[1]
    base = number(slope.get("input")) if slope.op == "pow" else None
    if base is not None and base > 0:
        return 1
    return int(bool(_SLOPES.search(label(slope))) and slope.op in ("parameter", "attribute", "name", "call", "method"))


@rule("ATT506", Severity.ERROR)
def wrong_slopes(facts: ModuleFacts) -> Iterator[Report]:
    """The slopes of ALiBi start with the wrong power, or grow."""
    for node in facts.nodes[ast.BinOp]:
        if not isinstance(node.op, ast.Pow) or not _is_about_slopes(node, facts):
            continue
        written = ast.unparse(node.right)
        if not re.search(r"8\b", written) or not re.search(r"2(\.0)?$", ast.unparse(node.left)):
            continue
        if (
            re.search(r"arange\(([\w.]+|0, [\w.]+)(, (device|dtype)[^)]*)?\)(\.\w+\(\))*(?! ?\+)", written)
            and "+ 1" not in written
        ):
            yield Report(node, "heads are counted from 0: the slopes of ALiBi are 2^(-8h/n) for h from 1 to n")
        elif "-" not in written and "1 /" not in ast.unparse(facts.parents[node]):
            yield Report(node, "these slopes grow with the head: the slopes of ALiBi are 2^(-8h/n)")


def _is_about_slopes(node: ast.AST, facts: ModuleFacts) -> bool:
    within = takewhile(lambda one: not isinstance(one, ast.ClassDef), around(node, facts))
    names = (
        one.name if isinstance(one, Function) else code_of(one.targets[0]) if isinstance(one, ast.Assign) else ""
        for one in within
    )
    return any(re.search(r"slope|alibi", name, re.I) for name in names)


_ANGLES = re.compile(r"freq|angle|theta|rope|rotary", re.I)
_TABLE_CALLS = ("cat", "repeat_interleave", "stack")
_HALF_TABLE = re.compile(r"cat\(\s*[\[(]\s*([\w.]+)\s*,\s*\1\s*[\])]")
_PAIR_TABLE = re.compile(
    r"repeat_interleave\(\s*2\b|repeat_interleave\([\w.]+, (repeats=)?2\b|stack\(\s*[\[(]\s*([\w.]+)\s*,\s*\2\s*[\])]"
)


@rule("ATT507", Severity.ERROR)
def mixed_rotary_pairs(facts: ModuleFacts) -> Iterator[Report]:
    """A rotary table for neighbouring pairs is used with a rotation of halves, or the reverse."""
    if not re.search(r"rotary|rope|rotate|theta|inv_freq", facts.source, re.I):
        return
    tables = _tables(facts)
    if not any(tables):
        return
    units = [
        node for node in facts.nodes[ast.ClassDef] if any(_is_inside(one, node) for found in tables for one in found)
    ]
    for unit in units or [facts.tree]:
        halves, pairs = _rotations(unit, facts)
        half_tables, pair_tables = ([one for one in found if _is_inside(one, unit)] for found in tables)
        if halves and not pairs and pair_tables and not half_tables:
            yield Report(pair_tables[0], "this table pairs neighbours, and the rotation pairs halves: use cat((a, a))")
        if pairs and not halves and half_tables and not pair_tables:
            yield Report(
                half_tables[0], "this table pairs halves, and the rotation pairs neighbours: use repeat_interleave(2)"
            )


def _is_inside(node: ast.Call, unit: ast.AST) -> bool:
    """Whether a call is in the text of a class; in that of a file it always is."""
    first, last = getattr(unit, "lineno", 0), getattr(unit, "end_lineno", None)
    return last is None or first <= node.lineno <= last


def _tables(facts: ModuleFacts) -> tuple[list[ast.Call], list[ast.Call]]:
    """The expressions of a file that repeat angles as a whole, and those that repeat each in place."""
    calls = [node for node in facts.nodes[ast.Call] if last_name(node.func) in _TABLE_CALLS]
    calls = [node for node in calls if _is_about_angles(node, facts) and not _is_in_closure(node, facts)]
    halves = [node for node in calls if _HALF_TABLE.match(ast.unparse(node).removeprefix("torch."))]
    return halves, [node for node in calls if _PAIR_TABLE.search(ast.unparse(node)) and _is_innermost(node)]


def _is_in_closure(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node is in a function within a function, as one that replaces a method of another file is."""
    function = function_around(node, facts)
    return function is not None and function_around(facts.parents.get(function), facts) is not None


def _is_innermost(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("repeat_interleave", "stack")


def _rotations(unit: ast.AST, facts: ModuleFacts) -> tuple[bool, bool]:
    """Whether a class, or a function that it calls, turns halves against each other, and whether neighbours."""
    called = {node.func.id for node in ast.walk(unit) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    parts = [unit, *(facts.functions[name] for name in called & facts.functions.keys())]
    halves = pairs = False
    for node in (one for part in parts for one in ast.walk(part)):
        is_join = isinstance(node, ast.Call) and last_name(node.func) in ("cat", "concat", "stack")
        written = ast.unparse(node) if is_join else ""
        if re.match(r"(torch\.)?(cat|concat|stack)\(\s*[\[(]\s*-", written):
            halves |= "stack(" not in written
            pairs |= "stack(" in written
    return halves, pairs


def _is_about_angles(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether an expression is about the angles of a table: by the names in its statement, not those of queries."""
    above = statement_around(node, facts)
    return not isinstance(above, Function | ast.ClassDef | ast.For | ast.If) and bool(
        re.search(r"freq|angle|theta|\bcos\b|\bsin\b|\bemb\b", code_of(above))
    )


@rule("ATT508", Severity.ERROR)
def heads_as_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Positions are counted along the axis of the heads, or of the batch."""
    for event in facts.operations("arange"):
        for size in (*event.term.items, *event.term.arguments.values()):
            if size.op != "size" or not isinstance(size.value, int):
                continue
            axes = _axes(size.input)
            if len(axes) == 4 and axes[size.value] == "heads" and counts_positions(event, facts):
                yield Report(event.node, f"axis {size.value} is that of the heads here: positions are another axis")

    for site in facts.sites:
        for counted in _counted_along_batch(site.query) if exchanges_middle(site.query) else ():
            yield Report(counted.node, "positions are counted along axis 0, and attention runs over axis 1")


def _counted_along_batch(query: Term) -> Iterator[Term]:
    """Of a query split into heads, (batch, heads, length, dim): positions counted along axis 0 of embedded tokens, and
    embedded as one for each row of them; no axes were moved on the way.
    """
    read = list(walk(source_of(query).input))
    if any(one.op in ("transpose", "permute", "rearrange", "method") for one in read):
        return
    tokens = {id(one.input) for one in read if one.op == "apply" and one.value == "torch.nn.Embedding"}
    for one in read:
        column = one.op == "item" and len(one.items) == 2 and is_none(one.items[1])
        column = column or (one.op == "unsqueeze" and number(one.get("dim")) == 1)
        counted = one.input if column else one
        length = counted.items[0] if counted.op == "arange" and len(counted.items) == 1 else counted
        if counted is not one and length.op == "size" and length.value == 0 and id(length.input) in tokens:
            yield counted


def _axes(term: Term) -> list[str]:
    """What each axis of a tensor is, "heads" or "", after a reshape into four axes; an empty list if not known."""
    for _ in range(20):
        if term.op == "reshape" and len(term.items) == 4:
            return ["heads" if _is_heads(one) else "" for one in term.items]
        if term.op in ("transpose", "permute"):
            return _moved(term, _axes(term.input))
        if term.op in ("cast", "dropout", "mul", "div", "carried", "contiguous"):
            term = term.input
        else:
            break
    return []


def _is_heads(size: Term) -> bool:
    name = label(size) or (str(size.value) if size.op in ("parameter", "attribute") else "")
    return bool(re.search(r"^(n_?)?(num_)?(kv_|key_value_|attention_)*heads?$|^(h|nh|n_h|H)$", name))


def _moved(term: Term, axes: list[str]) -> list[str]:
    if len(axes) != 4:
        return []
    if term.op == "permute":
        order = [number(one) for one in term.items]
        return [axes[int(one)] for one in order if one is not None] if None not in order else []
    first, second = number(term.get("dim0")), number(term.get("dim1"))
    if first is None or second is None:
        return []
    axes = list(axes)
    axes[int(first)], axes[int(second)] = axes[int(second)], axes[int(first)]
    return axes


@rule("ATT114", Severity.ERROR)
def missing_denominator(facts: ModuleFacts) -> Iterator[Report]:
    """Linear attention is not divided by the sum of its weights."""
    for event in facts.operations("matmul", "einsum"):
        outer = product(event.term)
        if outer is None or not facts.is_judged(event):
            continue
        inner = _state(outer.right) or _state(outer.left)
        if inner is None or not _has_feature_map(outer.left if _state(outer.right) else outer.right):
            continue
        if not any(_has_feature_map(one) for one in inner.operands()):
            continue
        factor = outer.left if _state(outer.right) else outer.right
        if any(_plain(one) is _plain(factor) for one in inner.operands()):  # A·B·Aᵀ, of a covariance
            continue
        if any(_is_learned(_plain(one)) for one in inner.operands()):  # x·W·yᵀ, a bilinear form
            continue
        if not re.search(r" / |/=|\.div|norm\(|Norm|reciprocal|softmax|divide|ones", code_of(event.function)):
            yield Report(event.node, "this linear attention is not divided by the sum of its weights")


def _state(term: Term) -> Term | None:
    """The product of keys and values that a factor is, or is the running sum of."""
    while term.op == "method" and term.value == "cumsum":
        term = term.input
    return term if term.op in ("matmul", "einsum") else None


def _plain(term: Term) -> Term:
    """A matrix without its transpositions."""
    while term.op == "transpose":
        term = term.input
    return term


def _is_learned(term: Term) -> bool:
    """Whether a matrix is a parameter of the module, and is not computed from its input."""
    return term.op == "call" and str(term.value).endswith("nn.Parameter")


_OTHER_VALUES = frozenset({"matmul", "einsum", "setitem", "stack", "cat", "size", "shape", "repeat_interleave"})
"""Where the search for a feature map stops: what is behind is another value than the features of one tensor."""


def _has_feature_map(term: Term) -> bool:
    """Whether a query or key went through a positive function: elu + 1, relu, exp or one of that name."""
    for one in walk(term, stop=_OTHER_VALUES):
        name = str(one.value) if one.op in ("call", "method", "apply", "exp") else ""
        if re.search(r"\belu$|\brelu$|\.elu|\.relu|ReLU|ELU|feature_map|\bphi\b", name) or one.op == "exp":
            return True
    return False


@rule("ATT509", Severity.WARNING)
def angles_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """Rotary angles are converted to the dtype of the activations before their sine and cosine."""
    for event in facts.operations("method", "call"):
        name = str(event.term.value).rpartition(".")[2]
        if name != "cos":
            continue
        angle = event.term.input if event.term.op == "method" else next(iter(event.term.items), None)
        about = angle is not None and any(_ANGLES.search(one) for one in names_in(angle))
        cast = about and angle is not None and _low_precision(angle)
        if cast and "enabled=False" not in code_of(event.function):  # with autocast off it is float32
            yield Report(event.node, "these angles are in the dtype of the activations: take cos and sin in float32")


def _low_precision(angle: Term, depth: int = 12) -> bool:
    """Whether the last conversion of angles, or of a factor, is to half precision or to the dtype of activations."""
    if angle.op == "cast":
        dtype = angle.get("dtype")
        if dtype is None:
            return False
        if dtype.op == "name":
            return dtype.value in HALF
        base = label(dtype.input) if dtype.op == "attribute" else ""
        return bool(re.match(r"^(x|q|k|query|key|hidden_states|inputs?|h|hidden|xq|xk)$", base))
    if depth == 0 or angle.op in ("apply", "parameter", "exp", "attribute", "size", "arange"):
        return False
    return any(_low_precision(one, depth - 1) for one in angle.operands())
