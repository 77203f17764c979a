"""The rule about the textbook formula."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from itertools import takewhile

from ..attention_sites import AttentionSite, Step, WrittenFormula
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import ModuleFacts
from ..python_syntax import below, code_of, last_name, target_names
from ..term import HALF, Term, moved_axes, number, walk
from .base import Report, formulas, rule
from .fused_rewrite import formula_terms, fused_rewrite
from .mask_uses import is_mask_name
from .softmax_rules import scores_rank, summed_axis


@rule("ATT901", Severity.HINT)
def textbook_formula(facts: ModuleFacts) -> Iterator[Report]:
    """Attention is written as the textbook formula, and its weights are used for nothing else."""
    for site in formulas(facts):
        if (
            _is_expressible(site)
            and not _is_used_elsewhere(site, facts)
            and not site.event.loops
            and not _is_beside_fused(site, facts)
            and not _is_over_features(site)
            and not _is_of_weights(site)
            and not _is_detached(site, facts)
            and not _says_written_out(site, facts)
        ):
            yield Report(
                site.node,
                "this is scaled_dot_product_attention, written out: the function keeps no matrix of weights in memory",
                fused_rewrite(site, facts),
            )


_FUSED_NAME = re.compile(r"scaled_dot_product|flash|memory_efficient_att|flex_att|(^|_)sdpa", re.I)
_KEEPING_AXES = ("mul", "div", "cast", "normalize", "dropout", "carried", "element", "chunk", "split", "unbind")
_LENGTH_NAME = re.compile(r"^(n|l|t|s|len|length|seq_?len(gth)?|n?_?tokens|num_tokens|num_patches)$", re.I)


def _is_beside_fused(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the same function calls a fused kernel in another branch, or a function of the file that calls one."""
    called = list(below(facts.function_around(site.node), ast.Call))
    if any(_FUSED_NAME.search(ast.unparse(one.func)) or _calls_fused(last_name(one.func), facts) for one in called):
        return True
    return any(
        event.function is site.event.function
        and (event.term.op in ("sdpa", "flex") or _FUSED_NAME.search(str(event.term.value)))
        for event in facts.operations("sdpa", "flex", "call", "method", "apply")
    )


def _calls_fused(name: str, facts: ModuleFacts) -> bool:
    """Whether all functions and methods of that name in the file call a fused kernel."""
    known = (facts.functions, *(one.methods for one in facts.classes.values()))
    found = [functions[name] for functions in known if name in functions]
    return bool(found) and all(
        any(_FUSED_NAME.search(ast.unparse(call.func)) for call in below(one, ast.Call)) for one in found
    )


def _is_over_features(site: WrittenFormula) -> bool:
    """Whether the scores sum over the positions, so that features attend to features, or have no axis of features.

    The weights then are few, and the fused function would take the length for the dimension of a head.
    """
    axis, term = site.scores.summed_left, site.query
    for _ in range(20):
        if term.op == "transpose":
            pair = {number(term[name]) for name in ("dim0", "dim1")}
            if pair == {-1.0, -2.0} or term.value in ("T", "mT", "t"):
                axis = {-1: -2, -2: -1}.get(axis, axis)
            elif not all(one is not None and one >= 0 for one in pair):
                return False
        elif term.op == "permute":
            order = moved_axes(term)
            if len(order) < -axis:
                return False
            axis = order[axis] - len(order)
        elif term.op == "unbind" and number(term["dim"]) == -1:
            return True
        elif term.op == "reshape":
            sizes = [ast.unparse(one.node) for one in term.items]
            return len(sizes) >= -axis and bool(_LENGTH_NAME.match(sizes[axis].rpartition(".")[2]))
        elif term.op not in (*_KEEPING_AXES, "choice") and not _is_leading_part(term):
            return False
        term = term.items[0] if term.op == "choice" else term.input
    return False


def _is_leading_part(term: Term) -> bool:
    """Whether a term is a part along the first axes, as `qkv[0]` is."""
    return term.op == "item" and all(number(one) is not None for one in term.items)


def _is_of_weights(site: AttentionSite) -> bool:
    """Whether what is averaged is itself made of weights, as the inverse of a kernel matrix is."""
    return any(one.op == "softmax" for one in walk(site.value, stop=frozenset({"apply"})))


_WRITTEN_OUT = re.compile(
    r"\b(explicit implementation|explicitly written|educational|didactic|for (illustration|teaching))\b"
)


def _says_written_out(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the text of a function or class around says that the formula is written out to be read."""
    around = facts.definitions_around(site.node)
    return any(_WRITTEN_OUT.search(ast.get_docstring(one) or "") for one in around)


def _is_detached(site: WrittenFormula, facts: ModuleFacts) -> bool:
    """Whether the weights are constants for the gradients, which those of a fused function are not."""
    for term in (site.softmax, *(step.term for step in site.after)):
        above = facts.around(facts.parents.get(term.node))
        within = takewhile(lambda one: one is not site.node and not isinstance(one, ast.stmt), above)
        if any(isinstance(one, ast.Attribute) and one.attr == "detach" for one in within):
            return True
    weights = site.node.left if isinstance(site.node, ast.BinOp) else next(iter(getattr(site.node, "args", ())), None)
    return code_of(weights).endswith(".detach()")


def _is_expressible(site: WrittenFormula) -> bool:
    """Whether a fused function has an argument for every step."""
    before, after = [step.op for step in site.before], {step.op for step in site.after}
    masks = ("masked_fill", "where", "setitem", "add")
    return (
        {*before} <= {"mul", "div", "cast", *masks}
        and after <= {"dropout", "cast"}
        and sum(op in masks for op in before) <= 2
        and summed_axis(site) == -1
        and _is_last_axis(site)
        and not any(_multiplies_by_mask(step) or _halves(step) for step in site.before)
    )


def _multiplies_by_mask(step: Step) -> bool:
    factor = step.operand if step.op == "mul" else None
    return factor is not None and (mask_values(factor) is not None or is_mask_name(factor))


def _halves(step: Step) -> bool:
    return step.op == "cast" and step.term["dtype"].value in HALF


def _is_last_axis(site: WrittenFormula) -> bool:
    """Whether the softmax is over the last axis for certain."""
    axis, rank = number(site.softmax["dim"]), scores_rank(site)
    return axis == -1 or (axis is not None and rank is not None and axis == rank - 1)


def _is_used_elsewhere(site: WrittenFormula, facts: ModuleFacts) -> bool:
    """Whether scores or weights are returned, stored or used in another computation."""
    chain = {id(term) for term in formula_terms(site)} | {id(site.output)}

    def used(term: Term, depth: int) -> bool:
        others = (one for one in facts.uses(term) if id(one) not in chain and one.value not in ("dtype", "device"))
        return any(one.op not in ("choice", "carried", "tuple") or not depth or used(one, depth - 1) for one in others)

    return any(used(term, 3) for term in formula_terms(site)) or _is_read_later(site, facts)


def _is_read_later(site: WrittenFormula, facts: ModuleFacts) -> bool:
    """Whether the text of the function reads the name of the weights behind the product with the values."""
    last = getattr(site.node, "end_lineno", None) or math.inf
    terms = (site.softmax, *(step.term for step in site.after))
    bound = (facts.parents.get(term.node) for term in terms)
    names = {name for one in bound if isinstance(one, ast.Assign) for name in target_names(one)}
    found = [one for one in below(facts.function_around(site.node), ast.Name) if one.id in names]
    stored = [one for one in found if isinstance(one.ctx, ast.Store)]
    return any(
        one.lineno > last and not any(other.id == one.id and last <= other.lineno <= one.lineno for other in stored)
        for one in found
        if isinstance(one.ctx, ast.Load)
    )
