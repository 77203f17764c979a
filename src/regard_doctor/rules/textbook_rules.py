"""The rule about the textbook formula."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile

from ..attention_sites import AttentionSite, Step
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import ModuleFacts
from ..term import HALF, Term, number, walk
from .base import Report, around, definitions_around, formulas, function_around, last_name, rule, target_names
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
                site.output.node,
                "this is scaled_dot_product_attention, written out: the function keeps no matrix of weights in memory",
                fused_rewrite(site, facts),
            )


_FUSED_NAME = re.compile(r"scaled_dot_product|flash|memory_efficient_att|flex_att|(^|_)sdpa", re.I)
_KEEPING_AXES = ("mul", "div", "cast", "normalize", "dropout", "carried", "element", "chunk", "split", "unbind")
_LENGTH_NAME = re.compile(r"^(n|l|t|s|len|length|seq_?len(gth)?|n?_?tokens|num_tokens|num_patches)$", re.I)


def _is_beside_fused(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the same function calls a fused kernel in another branch, so that the formula is the other path of it.

    The kernel may stand in a function of the file that is called there.
    """
    function = function_around(site.output.node, facts)
    called = [one for one in ast.walk(function) if isinstance(one, ast.Call)] if function is not None else []
    if any(_FUSED_NAME.search(ast.unparse(one.func)) or _calls_fused(last_name(one.func), facts) for one in called):
        return True
    return any(
        event.function is site.event.function
        and (event.term.op in ("sdpa", "flex") or _FUSED_NAME.search(str(event.term.value)))
        for event in facts.operations("sdpa", "flex", "call", "method", "apply")
    )


def _calls_fused(name: str, facts: ModuleFacts) -> bool:
    """Whether all functions and methods of that name in the file call a fused kernel."""
    methods = [one.methods[name] for one in facts.classes.values() if name in one.methods]
    found = [*methods, facts.functions[name]] if name in facts.functions else methods
    return bool(found) and all(
        any(isinstance(node, ast.Call) and _FUSED_NAME.search(ast.unparse(node.func)) for node in ast.walk(one))
        for one in found
    )


def _is_over_features(site: AttentionSite) -> bool:
    """Whether the scores sum over the positions, so that features attend to features, or have no axis of features.

    The weights then are few, and the fused function would take the length for the dimension of a head.
    """
    if site.scores is None:
        return False
    axis, term = site.scores.summed_left, site.query
    for _ in range(20):
        if term.op == "transpose":
            pair = {number(term.get(name)) for name in ("dim0", "dim1")}
            if pair == {-1.0, -2.0} or term.value in ("T", "mT", "t"):
                axis = {-1: -2, -2: -1}.get(axis, axis)
            elif not all(one is not None and one >= 0 for one in pair):
                return False
        elif term.op == "permute":
            order = [number(one) for one in term.items]
            if len(order) < -axis or order[axis] is None:
                return False
            axis = int(order[axis] or 0) - len(order)
        elif term.op == "unbind" and number(term.get("dim")) == -1:
            return True
        elif term.op == "item" and all(number(one) is not None for one in term.items):
            pass  # a part along the first axes, as `qkv[0]` is
        elif term.op == "reshape":
            sizes = [ast.unparse(one.node) for one in term.items]
            return len(sizes) >= -axis and bool(_LENGTH_NAME.match(sizes[axis].rpartition(".")[2]))
        elif term.op not in (*_KEEPING_AXES, "choice"):
            return False
        term = term.items[0] if term.op == "choice" else term.input
    return False


def _is_of_weights(site: AttentionSite) -> bool:
    """Whether what is averaged is itself made of weights, as the inverse of a kernel matrix is."""
    return any(one.op == "softmax" for one in walk(site.value, stop=frozenset({"apply"})))


_WRITTEN_OUT = re.compile(
    r"\b(explicit implementation|explicitly written|educational|didactic|for (illustration|teaching))\b"
)


def _says_written_out(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the text of a function or class around says that the formula is written out to be read."""
    around = definitions_around(site.output.node, facts)
    return any(_WRITTEN_OUT.search(ast.get_docstring(one) or "") for one in around)


def _is_detached(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the weights are constants for the gradients, which those of a fused function are not."""
    for term in [site.softmax, *(step.term for step in site.after)]:
        above = around(facts.parents.get(term.node) if term is not None else None, facts)
        within = takewhile(lambda one: one is not site.output.node and not isinstance(one, ast.stmt), above)
        if any(isinstance(one, ast.Attribute) and one.attr == "detach" for one in within):
            return True
    product = site.output.node
    operands = [product.left] if isinstance(product, ast.BinOp) else getattr(product, "args", [])
    return any(ast.unparse(one).endswith(".detach()") for one in operands[:1])


def _is_expressible(site: AttentionSite) -> bool:
    """Whether a fused function has an argument for every step."""
    before = {step.op for step in site.before}
    after = {step.op for step in site.after}
    masks = [step for step in site.before if step.op in ("masked_fill", "where", "setitem", "add")]
    return (
        before <= {"mul", "div", "masked_fill", "where", "setitem", "add", "cast"}
        and after <= {"dropout", "cast"}
        and len(masks) <= 2
        and site.softmax is not None
        and summed_axis(site) == -1
        and _is_last_axis(site)
        and not any(_multiplies_by_mask(step) or _halves(step) for step in site.before)
    )


def _multiplies_by_mask(step: Step) -> bool:
    factor = step.operand if step.op == "mul" else None
    return factor is not None and (mask_values(factor) is not None or is_mask_name(factor))


def _halves(step: Step) -> bool:
    dtype = step.term.get("dtype") if step.op == "cast" else None
    return dtype is not None and dtype.value in HALF


def _is_last_axis(site: AttentionSite) -> bool:
    """Whether the softmax is over the last axis for certain."""
    axis, rank = number(site.softmax.get("dim") if site.softmax else None), scores_rank(site)
    return axis == -1 or (axis is not None and rank is not None and axis == rank - 1)


def _is_used_elsewhere(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether scores or weights are returned, stored or used in another computation."""
    chain = {id(term) for term in formula_terms(site)} | {id(site.output)}

    def used(term: Term, depth: int) -> bool:
        for consumer in facts.consumers.get(id(term), []):
            if id(consumer) in chain or (consumer.op == "attribute" and consumer.value in ("dtype", "device")):
                continue
            if consumer.op in ("choice", "carried", "tuple") and depth:
                if used(consumer, depth - 1):
                    return True
                continue
            return True
        return False

    return any(used(term, 3) for term in formula_terms(site)) or _is_read_later(site, facts)


def _is_read_later(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the text of the function reads the name of the weights behind the product with the values."""
    function = function_around(site.output.node, facts)
    last = getattr(site.output.node, "end_lineno", None)
    if function is None or last is None or site.softmax is None:
        return False
    names = set()
    for term in (site.softmax, *(step.term for step in site.after)):
        statement = facts.parents.get(term.node)
        if isinstance(statement, ast.Assign):
            names |= target_names(statement)
    found = [one for one in ast.walk(function) if isinstance(one, ast.Name) and one.id in names]
    stored = [one for one in found if isinstance(one.ctx, ast.Store)]
    return any(
        one.lineno > last and not any(other.id == one.id and last <= other.lineno <= one.lineno for other in stored)
        for one in found
        if isinstance(one.ctx, ast.Load)
    )
