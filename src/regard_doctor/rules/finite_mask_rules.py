"""Rules about the numbers that hide scores: which of them a softmax ignores, a dtype holds, and scores cannot reach."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, Step, dtype_of_projection, names_in, poolings
from ..finding import Severity
from ..module_facts import Event, ModuleFacts
from ..term import ABSENT, COMPARISONS, Term, indices, is_none, number, same, through, walk
from .base import Report, formulas, rule
from .mask_uses import fill_value, filled_value, hides


@rule("ATT205", Severity.ERROR)
def mask_that_hides_nothing(facts: ModuleFacts) -> Iterator[Report]:
    """Hidden scores are set to a number that the softmax does not ignore."""
    for site in formulas(facts):
        hiding = {id(step) for step in site.before if hides(step.term.get("value"))}
        for step in site.before:
            found = fill_value(filled_value(step))
            again = hiding - {id(step)}  # hidden before, and rows without any visible key made finite
            if found is not None and found > -30 and not again:
                message = f"hidden scores are set to {found:g}, which the softmax does not ignore: use -inf"
                yield Report(step.term.node, message)


@rule("ATT221", Severity.WARNING)
def finite_mask_value(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are hidden by a finite number, which half precision cannot hold or scores can outgrow."""
    reports = list(_finite_values(facts))
    reasoned = {found for found, report in reports if _gives_reason(report.node, facts)}
    yield from (report for found, report in reports if found not in reasoned)


_REASON = re.compile(r"\b(nan|inf|infinity|overflow\w*|underflow\w*|fp16|float16|half|bf16|bfloat16|finite)\b", re.I)


def _gives_reason(node: ast.AST, facts: ModuleFacts) -> bool:
    return any(_REASON.search(comment) for comment in facts.comments_at(node))


def _finite_values(facts: ModuleFacts) -> Iterator[tuple[float, Report]]:
    """The finite numbers that scores are hidden by, with what is wrong with each."""
    for site in formulas(facts):
        for step in site.before:
            value, node = filled_value(step), step.term.node
            if step.op == "add" and step.operand is not None:
                value, node = _finite_number(step.operand)
            found = number(value["fill_value"] if value is not None and value.op in ("full", "full_like") else value)
            if value is None or found is None or not -math.inf < found <= -30:
                continue
            if not _is_right(found, value, step, site, facts):
                held = found < -1e37 and step.op in ("add", "where")
                held |= found < -65504 and "numpy" in facts.imports.values() and not _HALF.search(facts.source)
                reason = "which overflows in float16" if found < -65504 else "which scores can outgrow"
                unless = "scores are never float16, or the number becomes -inf there" if held else ""
                yield found, Report(node, _finite_message(found, reason), unless=unless)
    for one in (step for pooled in poolings(facts) for step in pooled.before()):
        found = _outgrown(one)
        if found is not None:
            yield found, Report(one.node, _finite_message(found))
    for event in facts.operations("mul"):  # masks that are made for several layers
        if _is_stored_as_mask(event, facts) and any(map(_is_truth_value, event.term.operands())):
            found = next((one for one in map(number, event.term.operands()) if one is not None), None)
            if found is not None and -20000 < found <= -30:
                yield found, Report(event.node, _finite_message(found))


def _is_right(found: float, value: Term, step: Step, site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether a finite number that a step hides by does so: nothing is hidden by it alone, or it fits its dtype."""
    if _hides_rows(step) or _is_chosen_elsewhere(value, step, facts):
        return True
    if found < -65504:
        return _is_single(step, site) or _is_single_mask(step)
    return found <= -20000 or _is_hidden_again(step, site)


_HALF = re.compile(r"torch|tensor|jax|paddle|mindspore", re.I)
"""Names of what computes in half precision; the arrays of numpy are float64."""


def _finite_message(found: float, reason: str = "which scores can outgrow") -> str:
    return f"scores are hidden by {found:g}, {reason}: fill with -inf, or finfo.min where a row may see no key"


def _is_chosen_elsewhere(value: Term, step: Step, facts: ModuleFacts) -> bool:
    """Whether a number comes from another function, of which the text says that it is chosen so."""
    other = facts.function_around(value.node) is not facts.function_around(step.term.node)
    return other and re.search(r"\b(deliberate|intentional)(ly)?\b", facts.text_around(value.node), re.I) is not None


def _hides_rows(step: Step) -> bool:
    """Whether whole rows are set to a number, of queries that nothing reads: `scores[padded, :] = -1e4`."""
    parts = indices(step.term)
    return len(parts) > 1 and parts[-1].op == "slice" and all(is_none(one) for one in parts[-1].items)


def _is_hidden_again(step: Step, site: AttentionSite) -> bool:
    """Whether the weights of the pairs that a step hides are set to 0 after the softmax."""
    hidden = step.term["mask"]
    return any(
        (one.op == "masked_fill" and same(one.term["mask"], hidden) and number(one.term["value"]) == 0)
        or (one.op == "mul" and any("mask" in name for name in names_in(one.operand or ABSENT)))
        for one in site.after
    )


def _is_single(step: Step, site: AttentionSite) -> bool:
    """Whether the scores that a step hides were converted to float32 or float64 before."""
    scores: Term | None = step.term
    while scores is not None:
        if scores.op == "cast":
            return _is_float32(scores.get("dtype"))
        found = next((one for one in site.before if one.term is scores), None)
        scores = found.term.get("input") if found is not None else None
    return _is_float32(dtype_of_projection(site.query))


def _is_single_mask(step: Step) -> bool:
    """Whether what a step adds is float32, as the sum then is, or becomes -inf in the dtype of the scores."""
    added = step.operand if step.op == "add" else None
    while added is not None:
        if added.op == "cast":
            return _is_float32(added.get("dtype")) or added.input.op in ("masked_fill", "full", "full_like", "mul")
        operands = [one for one in (added["input"], added["other"]) if one is not ABSENT and number(one) is None]
        added = operands[0] if added.op in _KEEPS_DTYPE and len(operands) == 1 else None
    return False


_KEEPS_DTYPE = frozenset({"mul", "add", "sub", "unsqueeze", "item", "expand", "transpose", "repeat", "negative"})


def _is_float32(dtype: Term | None) -> bool:
    return dtype is not None and dtype.value in ("torch.float32", "torch.float", "torch.float64", "torch.double")


def _outgrown(term: Term) -> float | None:
    """The finite number that a step fills in where it hides, if scores can be below it."""
    names = {"masked_fill": ("value",), "setitem": ("value",), "where": ("input", "other")}.get(term.op, ())
    found = (fill_value(term.get(name)) for name in names)
    return next((one for one in found if one is not None and -20000 < one <= -30), None)


def _is_stored_as_mask(event: Event, facts: ModuleFacts) -> bool:
    """Whether a value is stored under a name of masks: as a buffer or attribute, or as the result of a function.

    Words between, as in `vocabulary_mask`, are of other masks than those of scores.
    """
    for consumer in facts.uses(event.term):
        buffer = str(consumer.items[0].value) if consumer.value == "register_buffer" and consumer.items else ""
        function = getattr(event.function, "name", "")
        name = {"method": buffer, "store": str(consumer.value), "return": function}.get(consumer.op, "")
        if name:
            return bool(_SCORE_MASKS.search(name.rpartition(".")[2]))
    return False


_SCORE_MASKS = re.compile(
    r"(^|_)(attn|attention|causal|pad(ding)?|self|cross|key|src|tgt|trg|future|subsequent|look_?ahead|window|local|"
    r"additive|make|build|get|create|extended|bias)_?(_\w+)?_?masks?|^_?masks?$"
)


def _is_truth_value(term: Term) -> bool:
    """Whether a factor is 0 or 1: a comparison, or its complement, as numbers."""
    term = through(term, "cast", "unsqueeze", "item", "expand", "invert", "bool")
    return term.op in COMPARISONS or (term.op == "sub" and number(term["input"]) == 1)


def _finite_number(added: Term) -> tuple[Term | None, ast.AST]:
    """The number by which an added mask hides, and where it is written: (1 - mask) * -1e4, or a filled triangle."""
    for one in walk(added, stop=frozenset({"apply", "softmax", "matmul", *COMPARISONS})):
        factor = next((factor for factor in one.operands() if number(factor) is not None), ABSENT)
        found = {"mul": factor, "full": one["fill_value"], "masked_fill": one["value"]}.get(one.op)
        plain = number(found)
        if plain is not None and -math.inf < plain <= -30:
            return found, one.node
    return None, added.node
