"""Rules about rotary tables, linear biases and the feature maps of linear attention."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from ..attention_sites import names_in, product, source_of
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import ModuleFacts
from ..python_syntax import Function, below, code_of, last_name
from ..term import ABSENT, HALF, Term, exchanges_middle, is_none, label, moved_axes, number, sides, through, walk
from .base import Report, rule
from .position_rules import counts_positions

_SLOPES = re.compile(r"slope|alibi|^m$|^ratios?$", re.I)
_DISTANCES = (*("negative", "abs", "method", "item", "unsqueeze", "cast", "clamp", "carried", "expand"),)


@rule("ATT505", Severity.ERROR)
def rewarded_distance(facts: ModuleFacts) -> Iterator[Report]:
    """The linear bias of ALiBi grows with the distance instead of falling."""
    message = "this bias is larger for keys farther away: subtract slopes · distance"
    for node in _rewarding_functions(facts):
        yield Report(node, message)
    for site in facts.sites:
        biases = [(step.operand, 1 if step.op == "add" else -1) for step in site.before if step.op in ("add", "sub")]
        biases += [(site.output["attn_mask"], 1)] if site.kind == "sdpa" else []
        for one, sign in ((part, sign) for bias, sign in biases for part in _summands(bias or ABSENT)):
            values = _biased(one)
            if values is not None and bool((sign * np.diff(values[3, :3]) < 0).all()) and _names_slopes(one):
                yield Report(one.node, message)


def _rewarding_functions(facts: ModuleFacts) -> Iterator[ast.BinOp]:
    """Sums in functions of (score, batch, head, query, key) that add slope · (query - key)."""
    for function in facts.nodes[ast.FunctionDef]:
        names = [one.arg for one in function.args.args]
        if len(names) != 5 or not re.match(r"score|s$|qk", names[0]):
            continue
        for node in below(function, ast.BinOp):
            match node:
                case ast.BinOp(op=ast.Add(), right=ast.BinOp(left=left, op=ast.Mult(), right=right)):
                    sides = ast.unparse(left), ast.unparse(right)
                    distance = any(re.fullmatch(rf"\(?{names[3]} - {names[4]}\)?", side) for side in sides)
                    slope = any(re.match(r"\w*(slope|alibi)|m\[", side, re.I) for side in sides)
                    if distance and slope and not any(side.startswith("-") for side in sides):
                        yield node


def _summands(bias: Term) -> Iterator[Term]:
    """The parts of a bias that are added, or of which one is chosen."""
    bias = through(bias, "masked_fill", "cast", "unsqueeze", "item", "expand", "contiguous", "repeat")
    parts = tuple(bias.operands()) if bias.op in ("add", "choice") else ()
    yield from (one for part in parts for one in _summands(part))
    if not parts:
        yield bias


def _names_slopes(term: Term) -> bool:
    return any(_SLOPES.search(label(one)) or one.op == "pow" for one in walk(term))


def _biased(term: Term, depth: int = 12) -> NDArray | None:
    """The values of a bias by distance for four positions, with slopes of 1."""
    values = mask_values(term)
    if values is not None or depth == 0:
        return values.astype(float) if values is not None else None
    if term.op == "mul":
        products = ((_biased(distance, depth - 1), _slope_sign(slope)) for slope, distance in sides(term))
        return next((sign * found for found, sign in products if found is not None and sign), None)
    if "input" not in term.arguments or term.op not in _DISTANCES or (term.op == "method" and term.value != "abs"):
        return None
    inner = _biased(term.input, depth - 1)
    if inner is None:
        return None
    if term.op == "clamp":
        least, most = number(term["min"]), number(term["max"])
        return None if least is None and most is None else np.clip(inner, least, most)
    return np.abs(inner) if term.op in ("abs", "method") else -inner if term.op == "negative" else inner


def _slope_sign(slope: Term) -> int:
    """The sign of slopes: -1 where they are negated, 1 for a name of slopes or a power, 0 where that is not known."""
    while slope.op in ("item", "unsqueeze", "reshape", "cast", "carried", "expand", "contiguous"):
        if _SLOPES.search(label(slope)) and slope.input.op in ("parameter", "attribute"):
            return 1
        slope = slope.input
    if slope.op == "negative":
        return -_slope_sign(slope.input)
    if slope.op == "mul":
        return math.prod(map(_slope_sign, slope.operands()))
    plain = number(slope)
    if plain is not None:
        return 1 if plain > 0 else -1
    power = slope.op == "pow" and (number(slope["input"]) or 0) > 0
    named = slope.op in ("parameter", "attribute", "name", "call", "method") and _SLOPES.search(label(slope))
    return int(power or bool(named))


@rule("ATT506", Severity.ERROR)
def wrong_slopes(facts: ModuleFacts) -> Iterator[Report]:
    """The slopes of ALiBi start with the wrong power, or grow."""
    counted = re.compile(r"arange\(([\w.]+|0, [\w.]+)(, (device|dtype)[^)]*)?\)(\.\w+\(\))*(?! ?\+)")
    for node in facts.nodes[ast.BinOp]:
        if not isinstance(node.op, ast.Pow) or not _is_about_slopes(node, facts):
            continue
        written, base = ast.unparse(node.right), ast.unparse(node.left)
        if not re.search(r"8\b", written) or not re.search(r"2(\.0)?$", base):
            continue
        if counted.search(written) and "+ 1" not in written:
            yield Report(node, "heads are counted from 0: the slopes of ALiBi are 2^(-8h/n) for h from 1 to n")
        elif "-" not in written and "1 /" not in ast.unparse(facts.parents[node]):
            yield Report(node, "these slopes grow with the head: the slopes of ALiBi are 2^(-8h/n)")


def _is_about_slopes(node: ast.AST, facts: ModuleFacts) -> bool:
    within = list(takewhile(lambda one: not isinstance(one, ast.ClassDef), facts.around(node)))
    names = [one.name for one in within if isinstance(one, Function)]
    names += [ast.unparse(one.targets[0]) for one in within if isinstance(one, ast.Assign)]
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
    tables = _tables(facts) if re.search(r"rotary|rope|rotate|theta|inv_freq", facts.source, re.I) else ([], [])
    made = [one for found in tables for one in found]
    units = [node for node in facts.nodes[ast.ClassDef] if any(_is_inside(one, node) for one in made)]
    for unit in units or [facts.tree] if made else ():
        halves, pairs = _rotations(unit, facts)
        half_tables, pair_tables = ([one for one in found if _is_inside(one, unit)] for found in tables)
        if halves and not pairs and pair_tables and not half_tables:
            yield Report(pair_tables[0], "this table pairs neighbours, and the rotation pairs halves: use cat((a, a))")
        if pairs and not halves and half_tables and not pair_tables:
            message = "this table pairs halves, and the rotation pairs neighbours: use repeat_interleave(2)"
            yield Report(half_tables[0], message)


def _is_inside(node: ast.Call, unit: ast.AST) -> bool:
    """Whether a call is in the text of a class; in that of a file it always is."""
    first, last = getattr(unit, "lineno", 0), getattr(unit, "end_lineno", None)
    return last is None or first <= node.lineno <= last


def _tables(facts: ModuleFacts) -> tuple[list[ast.Call], list[ast.Call]]:
    """The expressions of a file that repeat angles as a whole, and those that repeat each in place."""
    calls = (node for node in facts.nodes[ast.Call] if last_name(node.func) in _TABLE_CALLS)
    calls = [node for node in calls if _is_about_angles(node, facts) and not _is_in_closure(node, facts)]
    halves = [node for node in calls if _HALF_TABLE.match(ast.unparse(node).removeprefix("torch."))]
    methods = (node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr != "cat")
    return halves, [node for node in methods if _PAIR_TABLE.search(ast.unparse(node))]


def _is_in_closure(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node is in a function within a function, as one that replaces a method of another file is."""
    function = facts.function_around(node)
    return function is not None and facts.function_around(facts.parents.get(function)) is not None


def _rotations(unit: ast.AST, facts: ModuleFacts) -> tuple[bool, bool]:
    """Whether a class, or a function that it calls, turns halves against each other, and whether neighbours."""
    called = {node.func.id for node in below(unit, ast.Call) if isinstance(node.func, ast.Name)}
    parts = [unit, *(facts.functions[name] for name in called & facts.functions.keys())]
    calls = (node for part in parts for node in below(part, ast.Call))
    joins = (ast.unparse(node) for node in calls if last_name(node.func) in ("cat", "concat", "stack"))
    turned = [one for one in joins if re.match(r"(torch\.)?(cat|concat|stack)\(\s*[\[(]\s*-", one)]
    return any("stack(" not in one for one in turned), any("stack(" in one for one in turned)


def _is_about_angles(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether an expression is about the angles of a table: by the names in its statement, not those of queries."""
    above = facts.statement_around(node)
    return not isinstance(above, Function | ast.ClassDef | ast.For | ast.If) and bool(
        re.search(r"freq|angle|theta|\bcos\b|\bsin\b|\bemb\b", code_of(above))
    )


@rule("ATT508", Severity.ERROR)
def heads_as_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Positions are counted along the axis of the heads, or of the batch."""
    for event in facts.operations("arange"):
        for size in (one for one in event.term.operands() if one.op == "size" and isinstance(one.value, int)):
            axes = _axes(size.input)
            if len(axes) == 4 and axes[size.value] == "heads" and counts_positions(event, facts):
                message = f"axis {size.value} is that of the heads here: positions are another axis"
                yield Report(event.node, message)
    for site in facts.sites:
        for counted in _counted_along_batch(site.query) if exchanges_middle(site.query) else ():
            yield Report(counted.node, "positions are counted along axis 0, and attention runs over axis 1")


def _counted_along_batch(query: Term) -> Iterator[Term]:
    """Of a query split into heads, (batch, heads, length, dim), with no axes moved on the way: positions counted along
    axis 0 of embedded tokens, and embedded as one for each row of them.
    """
    read = list(walk(source_of(query).input))
    if any(one.op in ("transpose", "permute", "rearrange", "method") for one in read):
        return
    tokens = {id(one.input) for one in read if one.applies("torch.nn.Embedding")}
    for one in read:
        column = one.op == "item" and len(one.items) == 2 and is_none(one.items[1])
        column = column or (one.op == "unsqueeze" and number(one["dim"]) == 1)
        length = one.input.items[0] if one.input.op == "arange" and len(one.input.items) == 1 else one.input
        if column and length.op == "size" and length.value == 0 and id(length.input) in tokens:
            yield one.input


def _axes(term: Term) -> list[str]:
    """What each axis of a tensor is, "heads" or "", after a reshape into four axes, or five of which queries, keys and
    values are taken; an empty list if not known.
    """
    term = through(term, "cast", "dropout", "mul", "div", "carried", "contiguous")
    if term.op == "reshape" and len(term.items) in (4, 5):
        return ["heads" if _is_heads(one) else "" for one in term.items]
    if term.input is term:
        return []
    if _is_one_of_several(term):
        axes = _axes(term.input.input if term.input.op == "unbind" else term.input)
        taken = int(number(term.input["dim"]) or 0) if term.input.op == "unbind" else 0
        return [one for index, one in enumerate(axes) if index != taken % len(axes)]
    if term.op == "element":  # of a split along the last axis
        return _axes(term.input.input)
    return _moved(term, _axes(term.input)) if term.op in ("transpose", "permute") else []


def _is_one_of_several(term: Term) -> bool:
    """Whether a term is the queries, keys or values of a tensor that has them along an axis of their own."""
    if term.op == "item":
        return len(term.items) == 1 and number(term.items[0]) is not None
    return term.op == "element" and term.input.op not in ("chunk", "split")


def _is_heads(size: Term) -> bool:
    name = label(size) or (str(size.value) if size.op in ("parameter", "attribute") else "")
    return bool(re.search(r"^(n_?)?(num_)?(kv_|key_value_|attention_)*heads?$|^(h|nh|n_h|H)$", name))


def _moved(term: Term, axes: list[str]) -> list[str]:
    order = moved_axes(term)
    if term.op == "permute":
        return [axes[one] for one in order] if len(axes) == len(order) else []
    if len(order) != 2 or len(axes) < 4:
        return []
    (first, second), moved = order, list(axes)
    moved[first], moved[second] = axes[second], axes[first]
    return moved


@rule("ATT114", Severity.ERROR)
def missing_denominator(facts: ModuleFacts) -> Iterator[Report]:
    """Linear attention is not divided by the sum of its weights."""
    for event in facts.judged("matmul", "einsum"):
        outer = product(event.term)
        state, factor = (_state(outer.right), outer.left) if outer is not None else (None, ABSENT)
        if state is None and outer is not None:
            state, factor = _state(outer.left), outer.right
        inner = list(state.operands()) if state is not None and _has_feature_map(factor) else []
        plain = [_plain(one) for one in inner]
        covariance = _plain(factor) in plain  # A·B·Aᵀ; and x·W·yᵀ, a bilinear form
        if covariance or any(map(_is_learned, plain)) or not any(map(_has_feature_map, inner)):
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
    return through(term, "transpose")


def _is_learned(term: Term) -> bool:
    """Whether a matrix is a parameter of the module, and is not computed from its input."""
    return term.op == "call" and str(term.value).endswith("nn.Parameter")


_OTHER_VALUES = frozenset({"matmul", "einsum", "setitem", "stack", "cat", "size", "shape", "repeat_interleave"})
"""Where the search for a feature map stops: what is behind is another value than the features of one tensor."""


def _has_feature_map(term: Term) -> bool:
    """Whether a query or key went through a positive function: elu + 1, relu, exp or one of that name."""
    made = [one for one in walk(term, stop=_OTHER_VALUES) if one.op in ("call", "method", "apply", "exp")]
    names = re.compile(r"\belu$|\brelu$|\.elu|\.relu|ReLU|ELU|feature_map|\bphi\b")
    return any(one.op == "exp" or names.search(str(one.value)) for one in made)


@rule("ATT509", Severity.WARNING)
def angles_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """Rotary angles are converted to the dtype of the activations before their sine and cosine."""
    for event in (one for one in facts.operations("method", "call") if one.name == "cos"):
        angle = event.term.input if event.term.op == "method" else next(iter(event.term.items), ABSENT)
        cast = any(map(_ANGLES.search, names_in(angle))) and _low_precision(angle)
        if cast and "enabled=False" not in code_of(event.function):  # with autocast off it is float32
            yield Report(event.node, "these angles are in the dtype of the activations: take cos and sin in float32")


def _low_precision(angle: Term, depth: int = 12) -> bool:
    """Whether the last conversion of angles, or of a factor, is to half precision or to the dtype of activations."""
    if angle.op == "cast":
        dtype = angle["dtype"]
        base = label(dtype.input) if dtype.op == "attribute" else ""
        of_activations = re.match(r"^(x|q|k|query|key|hidden_states|inputs?|h|hidden|xq|xk)$", base)
        return dtype.value in HALF if dtype.op == "name" else of_activations is not None
    if depth == 0 or angle.op in ("apply", "parameter", "exp", "attribute", "size", "arange"):
        return False
    return any(_low_precision(one, depth - 1) for one in angle.operands())
