"""Attention sites: the places of a module where attention is computed, with their parts, in whatever spelling.

A site is a call of a fused kernel (`scaled_dot_product_attention`, `flex_attention`, `nn.MultiheadAttention`) or the
textbook formula softmax(q·kᵀ·scale + mask)·v: a product of which the left factor leads, through dropout, casts and
masks, to a softmax whose input leads, through scales, masks and casts, to another product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from .array_frameworks import LAYERS
from .module_facts import Event, ModuleFacts
from .term import ABSENT, Term, label, lineage, number, sides, text, walk

TRANSPARENT = frozenset(
    {
        *("cast", "dropout", "masked_fill", "setitem", "reshape", "unsqueeze", "squeeze", "expand", "transpose"),
        *("permute", "tanh", "clamp", "carried", "negative", "rearrange", "unflatten", "flatten", "repeat"),
        *("tril", "triu"),
    }
)
"""Operations of which the input is looked through on the way from a product to the softmax and back."""
_ARITHMETIC = ("add", "sub", "mul", "div")
_LONGEST_PATH = 40


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation between two parts of the formula; `operand` is its other operand, if it has one."""

    op: str
    term: Term
    operand: Term | None
    conditional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A matrix product or einsum: its operands, and the axes over which it sums, counted from the end."""

    term: Term
    left: Term
    right: Term
    summed_left: int
    summed_right: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSite:
    """One computation of attention.

    `kind` is "formula", "sdpa", "flex" or "module"; `event` is the call, or the product with the values. Of a formula,
    `before` are the steps from the product of queries and keys to the softmax, `after` those to the product with the
    values.
    """

    kind: str
    event: Event
    query: Term
    key: Term
    value: Term
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    @property
    def output(self) -> Term:
        """The call, or the product with the values."""
        return self.event.term

    @property
    def node(self) -> Any:
        """The place of the output."""
        return self.event.term.node

    @property
    def place(self) -> Any:
        """The outermost followed call that computes it, or the place of the output where none does."""
        return self.event.call or self.node

    def masks(self) -> Iterator[Step]:
        """The steps before the softmax that can hide keys: fills, `where`, and sums with what is not a constant."""
        for step in self.before:
            if step.op in ("masked_fill", "where", "setitem") or (
                step.op in ("add", "sub")
                and step.operand is not None
                and number(step.operand) is None
                and not any(one.op == "max" for one in walk(step.operand))
            ):
                yield step


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WrittenFormula(AttentionSite):
    """The textbook formula: `scores` is the product of queries and keys, `weighted` that of weights and values."""

    scores: Product
    softmax: Term
    weighted: Product


def attention_sites(facts: ModuleFacts) -> list[AttentionSite]:
    r"""The attention sites of a module, in the order of the source.

    A function that others of the file call is judged by those calls alone: what it is passed is known there.

    >>> from .symbolic_evaluation import evaluate
    >>> site, = attention_sites(evaluate("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-1) @ v"))
    >>> site.kind, site.query.value, site.key.op, [step.op for step in site.before]
    ('formula', 'q', 'transpose', ['div'])
    """
    found = map(_site, facts.judged("matmul", "einsum", "sdpa", "flex", "apply"))
    sites = [site for site in found if site is not None]
    return sorted(sites, key=lambda site: (site.node.lineno, site.node.col_offset))


def _site(event: Event) -> AttentionSite | None:
    term = event.term
    attends = term.op == "apply" and (term.value == "torch.nn.MultiheadAttention" or term.value in LAYERS)
    if term.op in ("sdpa", "flex") or attends:
        query, key, value = term["query"], term["key"], term["value"]
        kind = "module" if term.op == "apply" else term.op
        return None if ABSENT in (query, key, value) else AttentionSite(kind, event, query, key, value)
    return _formula(event) if term.op in ("matmul", "einsum") else None


def _formula(event: Event) -> AttentionSite | None:
    weighted = product(event.term)
    found = path(weighted.left, _is_softmax) if weighted is not None else None
    if weighted is None or found is None or weighted.left is weighted.right:
        return None
    softmax, after = found
    led = path(softmax.input, lambda term: product(term) is not None)
    scores = product(led[0]) if led is not None else None
    if led is None or scores is None or path(scores.left, _is_softmax) is not None:  # a softmax of another formula
        return None
    operands = scores.left, scores.right, weighted.right
    return WrittenFormula("formula", event, *operands, led[1], after, scores=scores, softmax=softmax, weighted=weighted)


def _is_softmax(term: Term) -> bool:
    return term.op == "softmax"


@dataclass(frozen=True, slots=True, eq=False)
class WeightedAverage:
    """A softmax whose weights average vectors without a product of queries and keys, as additive attention does.

    `output` is the einsum with the values, or the sum of the product with them; `after` are the steps from the softmax
    to that product.
    """

    softmax: Term
    output: Term
    after: tuple[Term, ...]

    def before(self) -> Iterator[Term]:
        """The operations from a layer or parameter to the softmax, the last one first."""
        term = self.softmax.input
        for _ in range(_LONGEST_PATH):
            if term.op in TRANSPARENT or term.op in _ARITHMETIC or term.op in ("where", "item"):
                yield term
                inner = term.get("other") if term.op == "where" and _is_filled(term.input) else term.get("input")
            elif term.op == "choice" and term.items:
                inner = term.items[0]
            else:
                return
            if inner is None:
                return
            term = inner


def _is_filled(term: Term) -> bool:
    return number(term) is not None or term.op in ("full", "full_like")


def poolings(facts: ModuleFacts) -> list[WeightedAverage]:
    r"""The weighted averages of a module that are not attention sites.

    >>> from .symbolic_evaluation import evaluate
    >>> facts = evaluate("def f(x, w):\n    a = (x @ w).softmax(1)\n    return (a[..., None] * x).sum(1)")
    >>> pooled, = poolings(facts)
    >>> pooled.output.op, [one.op for one in pooled.after]
    ('sum', ['item'])
    """
    known = {id(site.softmax) for site in facts.sites if isinstance(site, WrittenFormula)}
    return [
        WeightedAverage(event.term, output, after)
        for event in facts.judged("softmax")
        if id(event.term) not in known
        for output, after in _averages(event.term, facts, ())
    ]


def _averages(term: Term, facts: ModuleFacts, after: tuple[Term, ...]) -> Iterator[tuple[Term, tuple[Term, ...]]]:
    """The averages that are taken with these weights, each with the steps on the way."""
    if len(after) > 6:
        return
    for consumer in facts.uses(term):
        if consumer.op == "einsum":
            if mixed_heads(consumer) is None:
                yield consumer, after
        elif consumer.op == "mul":
            if any(other is not term and _is_made_of(other, term) for other in consumer.operands()):
                continue  # p · log p
            sums = [one for one in facts.uses(consumer, "sum") if one.input is consumer]
            yield from ((one, after) for one in sums)
            if not sums:
                yield from _averages(consumer, facts, (*after, consumer))
        elif consumer.op in ("cast", "dropout", "masked_fill", "unsqueeze", "item", "choice") and (
            consumer.op == "choice" or consumer.input is term
        ):
            yield from _averages(consumer, facts, (*after, consumer))


def _is_made_of(term: Term, source: Term) -> bool:
    """Whether a term is computed from another one by functions of one argument."""
    for _ in range(8):
        if term is source:
            return True
        if "input" in term.arguments and term.op not in ("mul", "matmul", "item"):
            term = term.input
        elif term.op == "call" and term.items:
            term = term.items[0]
        else:
            return False
    return False


def product(term: Term) -> Product | None:
    """A term as a matrix product with one summed axis, or None."""
    if term.op == "matmul" and "input" in term.arguments and "other" in term.arguments:
        return Product(term, term["input"], term["other"], -1, -2)
    equation = _equation(term)
    if equation is None or mixed_heads(term) is not None:
        return None
    (left, right), (first, second, out) = equation
    summed = [letter for letter in first if letter in second and letter not in out and letter != "..."]
    if len(summed) != 1:
        return None
    return Product(term, left, right, first.index(summed[0]) - len(first), second.index(summed[0]) - len(second))


def equation_axes(term: Term) -> tuple[list[str], list[str], list[str]] | None:
    """The axes of both operands and of the result of an einsum; None where its equation is not known."""
    pattern = next((one.value for one in term.items if one.op == "constant" and isinstance(one.value, str)), "")
    return einsum_axes(pattern)


def _equation(term: Term) -> tuple[list[Term], tuple[list[str], list[str], list[str]]] | None:
    """The two operands of an einsum and the axes of its equation, or None."""
    items = term.items
    if term.op != "einsum" or len(items) < 2:
        return None
    pattern = items[-1] if items[-1].op == "constant" and isinstance(items[-1].value, str) else items[0]
    operands = [one for one in items if one is not pattern]
    if len(operands) == 1 and operands[0].op == "tuple":
        operands = list(operands[0].items)
    if not isinstance(pattern.value, str) or len(operands) != 2:
        return None
    axes = einsum_axes(pattern.value)
    return None if axes is None else (operands, axes)


def mixed_heads(term: Term) -> Term | None:
    """The scores or weights whose heads an einsum replaces by mixtures of them, `b h i j, h g -> b g i j`, or None."""
    equation = _equation(term)
    if equation is None:
        return None
    operands, (first, second, out) = equation
    mixes = len(second) == 2 and len(first) > 2 and second[0] in first[:-2] and out[-2:] == first[-2:]
    return operands[0] if mixes else None


def einsum_axes(equation: str) -> tuple[list[str], list[str], list[str]] | None:
    """The axes of both operands and of the result of an equation, of torch or of einops.

    >>> einsum_axes("b h i d, b h j d -> b h i j")
    (['b', 'h', 'i', 'd'], ['b', 'h', 'j', 'd'], ['b', 'h', 'i', 'j'])
    """
    sides = equation.split("->")
    inputs = sides[0].split(",")
    if len(sides) != 2 or len(inputs) != 2:
        return None

    def axes(part: str) -> list[str]:
        if re.search(r"[a-zA-Z_]\w* +[a-zA-Z_.]", part.strip()):
            return part.split()
        return re.findall(r"\.\.\.|[a-zA-Z]", part)

    return axes(inputs[0]), axes(inputs[1]), axes(sides[1])


def path(term: Term, goal: Callable[[Term], bool], length: int = _LONGEST_PATH) -> tuple[Term, tuple[Step, ...]] | None:
    """The term that satisfies the goal, and the steps from there to `term` in the order of computation.

    Follows what is computed from the goal: the input of transparent operations, that operand of a sum or product that
    leads there, both sides of a choice.
    """
    if goal(term):
        return term, ()
    if length == 0:
        return None
    if term.op == "choice":
        return _chosen_path(term, goal, length)
    for inner, other in _continuations(term):
        found = path(inner, goal, length - 1)
        if found is not None:
            return found[0], (*found[1], Step(term.op, term, other))
    return None


def _chosen_path(term: Term, goal: Callable[[Term], bool], length: int) -> tuple[Term, tuple[Step, ...]] | None:
    found = [one for one in (path(item, goal, length - 1) for item in term.items) if one is not None]
    if len(found) < 2 or found[0][0] is not found[1][0]:
        return found[0] if found else None
    one, other = found[0][1], found[1][1]
    shared = {id(step.term) for step in one} & {id(step.term) for step in other}
    steps = (*one, *(step for step in other if id(step.term) not in shared))
    return found[0][0], tuple(step if id(step.term) in shared else replace(step, conditional=True) for step in steps)


def _continuations(term: Term) -> Iterator[tuple[Term, Term | None]]:
    """Operands through which a path may go on, each with the other operand."""
    if term.op in TRANSPARENT:
        yield term.input, term.get("mask") or term.get("index")
    elif term.op == "div":
        yield from islice(sides(term), 1)
    elif term.op in _ARITHMETIC or term.op == "where":
        yield from sides(term)
    elif (mixed := mixed_heads(term)) is not None:
        yield mixed, None
    elif term.op in ("max", "maximum") and "input" in term.arguments:  # of scores and the lowest number
        bound = term.get("other") or term.get("dim")
        if bound is not None and bound.op != "constant":
            yield term.input, bound


# Scale factors


@dataclass(frozen=True, slots=True)
class DimensionPower:
    """A scale factor as a power of a dimension: 1/√d is the power -0.5 of d. `dimension` is None for a constant."""

    power: float
    dimension: Term | None

    def by(self, op: str) -> DimensionPower:
        """The power by which a product with the factor scales, or, where `op` is "div", a quotient by it."""
        return replace(self, power=-self.power) if op == "div" else self


_SIZE_NAME = re.compile(
    r"(^|_)(d|dk|dq|dv|dims?|depth|width|channels?|feats?|features?|hidden|embd?|emb|embedding|embed|size|units)(_|$|\d)|^(d|D|C|E|hs|dk|d_?k|d_?model)$"
)
SCALE_NAME = re.compile(
    r"scal|temper|norm|sqrt|inv_|multiplier|logit|factor|softmax_|tau|alpha|gamma|beta", re.IGNORECASE
)


def dimension_power(term: Term) -> DimensionPower | None:
    r"""A scale factor as a power of one dimension, where it is written as one; None where it is anything else.

    >>> from .symbolic_evaluation import evaluate
    >>> facts = evaluate("import math\ndef f(x, head_dim): return x * (1 / math.sqrt(head_dim))")
    >>> dimension_power(facts.operations("mul")[0].term.get("other")).power
    -0.5
    """
    if number(term) is not None:
        return DimensionPower(0.0, None)
    if term.op in ("sqrt", "rsqrt"):
        inner = dimension_power(term.input)
        factor = 0.5 if term.op == "sqrt" else -0.5
        return DimensionPower(factor * inner.power, inner.dimension) if inner else None
    if term.op in ("cast", "carried"):
        return dimension_power(term.input)
    if term.op == "call" and term.value in ("float", "torch.tensor", "torch.FloatTensor", "int") and term.items:
        inner = term.items[0].items[0] if term.items[0].op == "tuple" and term.items[0].items else term.items[0]
        return dimension_power(inner)
    if term.op == "pow":
        inner, exponent = dimension_power(term["input"]), number(term["other"])
        return DimensionPower(inner.power * exponent, inner.dimension) if inner and exponent is not None else None
    if term.op in ("mul", "div"):
        return _combined_power(term)
    if term.op == "boolean" and term.value == "or" and term.items:  # scale or 1 / sqrt(d)
        return dimension_power(term.items[-1])
    return DimensionPower(1.0, term) if is_dimension(term) else None


def _combined_power(term: Term) -> DimensionPower | None:
    one, other = dimension_power(term["input"]), dimension_power(term["other"])
    if one is None or other is None:
        return None
    sign = 1 if term.op == "mul" else -1
    if one.dimension is not None and other.dimension is not None and text(one.dimension) != text(other.dimension):
        return None
    dimension = one.dimension if one.dimension is not None else other.dimension
    return DimensionPower(one.power + sign * other.power, dimension)


def is_dimension(term: Term) -> bool:
    """Whether a term is the size of an axis, by how it is computed or by its name."""
    if term.op in ("size", "floordiv"):
        return True
    name = str(term.value) if term.op in ("parameter", "attribute", "name") else ""
    return bool(name) and bool(_SIZE_NAME.search(name)) and not SCALE_NAME.search(name)


def scale_steps(term: Term) -> list[Term]:
    """The products and quotients on the way from a projection to `term`: where a query or key may have been scaled."""
    made = walk(term, stop=frozenset({"apply", "softmax", "sdpa", "parameter", "item_index"}))
    return [one for one in made if one.op in ("mul", "div", "normalize", "rsqrt", "sqrt")]


def source_of(term: Term) -> Term:
    """The projection, parameter or unknown value that a query, key or value is made from by moving its axes about."""
    for _ in range(_LONGEST_PATH):
        if (
            term.op in TRANSPARENT
            or term.op in ("element", "item", "loop_item", "chunk", "split", "unbind")
            or (term.op in ("repeat_interleave", "method") and "input" in term.arguments)
        ):
            term = term.input
        elif term.op == "choice":
            term = term.items[-1]
        elif term.op in ("mul", "div") and "input" in term.arguments:
            term = term.input
        else:
            break
    return term


def projection_name(term: Term) -> str:
    """The class name of the module that projects a query, key or value, such as "torch.nn.Linear"; '' if unknown."""
    source = source_of(term)
    return str(source.value or "") if source.op == "apply" else ""


def dtype_of_projection(query: Term) -> Term | None:
    """The dtype to which a query, or the input of its projection, was converted last; None where it was not."""
    *_, last = lineage(query, *_OF_ONE_DTYPE)
    return last.get("dtype") if last.op == "cast" else None


_OF_ONE_DTYPE = (
    *("element", "item", "chunk", "split", "unbind", "loop_item", "apply", "transpose", "reshape", "permute", "mul"),
    *("div", "unflatten", "rearrange"),
)
"""Operations whose result has the dtype of their input."""


def names_in(term: Term, *, stop: frozenset[str] = frozenset()) -> set[str]:
    """All names of the source in a term, for questions such as whether a cache is in it; as `walk`."""
    return {label(one) for one in walk(term, stop=stop)} - {""}
