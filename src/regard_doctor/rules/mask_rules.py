"""Rules about masks: which pairs are hidden, and by which meaning of True."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

from numpy.typing import NDArray

from ..array_frameworks import LAYERS
from ..attention_sites import poolings
from ..finding import Severity
from ..mask_values import hidden_pairs, is_zero_one, mask_values, triangle
from ..module_facts import ModuleFacts
from ..term import ABSENT, COMPARISONS, Term, is_none, label, number, sides, through, walk
from .base import Report, formulas, rule
from .mask_uses import (
    TORCH_MASKS,
    MaskUse,
    formula_mask,
    hides,
    is_counted,
    is_mask_name,
    mask_uses,
    parts_that_hide,
    resolved,
)


@rule("ATT201", Severity.ERROR)
def inverted_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the past instead of the future."""
    for use, mask, values in _known_uses(facts):
        is_number = not use.added and values.dtype != bool and mask.op not in (*COMPARISONS, "bool", "invert")
        if not is_number and _hidden(use, values) in ("past", "past and self"):
            meaning = "ignore" if use.true_hides else "attend"
            reason = f"; to {use.where}, True means {meaning}" if values.dtype == bool else ""
            yield Report(use.node.node, f"this mask hides the past and shows the future{reason}: invert it")


def _known_uses(facts: ModuleFacts) -> Iterator[tuple[MaskUse, Term, NDArray]]:
    """The uses of masks, one for each alternative whose values are known; not added ones and zeros, which hide none."""
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is not None and not (use.added and is_zero_one(values)):
                yield use, mask, values


def _hidden(use: MaskUse, values: NDArray) -> str:
    """Which pairs a mask hides where it is used, in the words of `triangle`."""
    return triangle(hidden_pairs(values if use.added else values.astype(bool), true_hides=use.true_hides))


@rule("ATT202", Severity.ERROR)
def numeric_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of the numbers 0 and 1 is added to the scores, so that it hides nothing."""
    for use in mask_uses(facts):
        alternatives = list(resolved(use.mask))
        if len(alternatives) > 1 and any(_is_filled(one) for one in alternatives):
            continue  # converted under a condition, which may always be true of it
        in_formula = use.where == "the softmax"  # where booleans are numbers
        for mask in (part for one in alternatives for part in summands(one)):
            values = mask_values(mask)
            added = values is not None and (is_zero_one(values) or (values.dtype == bool and in_formula))
            if use.added and (added or (values is None and _is_float_comparison(mask, plain=in_formula))):
                yield Report(
                    use.node.node,
                    f"a mask of numbers is added to the scores in {use.where}; 0 and 1 hide nothing: pass booleans, "
                    "or 0 and -inf",
                )


def _is_filled(mask: Term) -> bool:
    """Whether a mask is made by a fill with a number that hides."""
    filled = ((one, {"masked_fill": "value", "where": "other"}.get(one.op)) for one in walk(mask))
    return any(hides(one.get(name)) for one, name in filled if name is not None)


def summands(mask: Term) -> Iterator[Term]:
    """A mask, and what it is the sum of."""
    yield mask
    for one in mask.operands() if mask.op == "add" else ():
        yield from summands(one)


def _is_broadcast_padding(mask: Term) -> bool:
    """Whether a mask is a parameter of (batch, keys) with axes inserted for heads and queries, as it came."""
    inserted = sum(is_none(one) for one in mask.items) if mask.op == "item" else 0
    return inserted == 2 and mask.input.op == "parameter" and not is_none(mask.items[-1])


def _is_float_comparison(mask: Term, *, plain: bool = False) -> bool:
    """Whether a mask is a comparison, which is boolean, converted to numbers; `plain`: or not converted."""
    mask = through(mask, *_MOVED)
    dtype = mask["dtype"] if mask.op == "cast" else ABSENT
    converted = str(dtype.value).startswith("torch.float")
    if mask.op == "cast" and _is_broadcast_padding(mask.input) and (converted or dtype.op != "name"):
        return True
    if not converted and not (plain and mask.op in ("equal", "not_equal", "bool")):
        return False
    return through(mask.input if converted else mask, *_MOVED, "invert").op in (*COMPARISONS, "bool")


_MOVED = ("unsqueeze", "expand", "reshape", "item", "repeat")


@rule("ATT203", Severity.ERROR)
def hidden_diagonal(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the position itself, so that the first query attends to nothing."""
    for use, _, values in _known_uses(facts):
        if _hidden(use, values) == "future and self":
            yield Report(
                use.node.node,
                "this causal mask hides the diagonal too: the first position attends to nothing; start at diagonal=1",
            )


@rule("ATT215", Severity.ERROR)
def visible_next_position(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask leaves the next position visible."""
    for use, _, values in _known_uses(facts):
        if _hidden(use, values) == "future but the next":
            yield Report(use.node.node, "this causal mask shows each position the next one: move its diagonal by 1")
    for event in facts.operations("return"):
        name = event.function.name if event.function is not None else ""
        named = re.search(r"mask|subsequent|causal|future|look_?ahead", name)
        values = mask_values(event.term.input) if named and event.depth == 0 else None
        if values is not None and triangle(~values.astype(bool)) == "future but the next":
            yield Report(event.term.input.node, "this causal mask shows each position the next one: use diagonal=0")
    for event in facts.operations("masked_fill"):
        values = mask_values(event.term.get("mask"))
        if values is not None and values.dtype == bool and triangle(values) == "future but the next":
            yield Report(event.node, "this causal mask shows each position the next one: fill triu(diagonal=1)")


@rule("ATT204", Severity.ERROR)
def zero_times_infinity(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of 0 and 1 is multiplied by infinity: 0 · inf is NaN."""
    for event in facts.operations("mul"):
        for factor, other in sides(event.term):
            plain = number(factor)
            if plain is not None and math.isinf(plain) and number(other) is None and _has_zeros(other):
                yield Report(event.node, "0 · inf is NaN: use masked_fill with -inf, or torch.where")
                break


def _has_zeros(term: Term) -> bool:
    """Whether a factor is a mask that has zeros, by its values, its name or how it is computed."""
    values = mask_values(term)
    if values is not None:
        return bool((values == 0).any())
    complement = term.op == "sub" and number(term["input"]) == 1
    made = term.op in ("equal", "not_equal", "bool", "invert", "triu", "tril")
    return complement or made or (term.op == "cast" and _has_zeros(term.input))


@rule("ATT206", Severity.ERROR)
def multiplied_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are multiplied by a mask before the softmax."""
    for site in formulas(facts):
        for step in site.before if not any(site.masks()) else ():
            operand = step.operand if step.op == "mul" and step.operand is not None else ABSENT
            values = mask_values(operand)
            if (values is not None and is_zero_one(values)) or is_mask_name(operand):
                yield Report(
                    step.term.node,
                    "scores are multiplied by a mask: a score of 0 is not hidden; fill with -inf where the mask is 0",
                )
    for scaled in _multiplied_before_softmax(facts):
        yield Report(scaled.node, "scores are multiplied by a mask: a score of 0 is not hidden; fill with -inf")


def _multiplied_before_softmax(facts: ModuleFacts) -> Iterator[Term]:
    """Products of other scores with a mask whose softmax is not masked afterwards, as by a second product."""
    formulas_of = {id(site.softmax) for site in formulas(facts)}
    for event in facts.operations("softmax"):
        scaled, again = event.term.input, facts.uses(event.term, "mul", "masked_fill", "where")
        of_formula = again or id(event.term) in formulas_of
        if scaled.op == "mul" and not of_formula and sum(map(is_mask_name, (scaled["input"], scaled["other"]))) == 1:
            yield scaled


def _is_mask_of_weights(mask: Term) -> bool:
    """Whether weights are multiplied by a mask: of zeros and ones, by its name, or a comparison of positions.

    One with a last axis of 1 hides queries, whose outputs it makes 0: no mask of keys.
    """
    if mask.op == "unsqueeze" and number(mask.get("dim")) == -1:
        return False
    while mask.op in ("equal", "not_equal", "invert", "cast", "unsqueeze", "item", "rearrange", "bool"):
        if true_at(mask):
            return True
        mask = mask.input
    values = mask_values(mask)
    if values is not None and (is_zero_one(values) or values.dtype == bool):
        return True
    compared = mask.op in ("less", "less_equal", "greater", "greater_equal")
    counted = compared and any(one.op == "arange" for operand in mask.operands() for one in walk(operand))
    valid = mask.op in ("parameter", "attribute") and re.search(r"^(is_)?valid(ity)?$", str(mask.value))
    return counted or is_mask_name(mask) or bool(valid)


@rule("ATT207", Severity.ERROR)
def mask_after_softmax(facts: ModuleFacts) -> Iterator[Report]:
    """The mask is applied to the weights, after the softmax, and to nothing before it."""
    message = "the weights are masked after the softmax and do not sum to 1: mask the scores"
    for site in formulas(facts):
        if any(site.masks()) or any(step.op in ("div", "normalize") for step in site.after):
            continue
        for step in site.after:
            mask = step.operand if step.op in ("mul", "masked_fill") else None
            if mask is not None and _is_mask_of_weights(mask):
                yield Report(step.term.node, message)
    for pooled in poolings(facts):
        if any(one.op in ("masked_fill", "where", "setitem", "add", "sub") for one in pooled.before()):
            continue
        inner = pooled.softmax
        for step in pooled.after:
            factor = step["other"] if step.input is inner else step.input
            mask = {"masked_fill": step["mask"], "mul": factor}.get(step.op, ABSENT)
            if _is_mask_of_weights(mask):
                yield Report(step.node, message)
            inner = step


@rule("ATT208", Severity.ERROR)
def inverted_padding_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A padding mask hides the words and shows the padding."""
    for event in filter(facts.is_judged, facts.applied(*TORCH_MASKS)):
        for name in TORCH_MASKS[str(event.term.value)][1]:
            for mask in resolved(event.term[name]):
                if not _is_plain(through(mask, "cast", "bool")) and true_at(mask) == "words":
                    yield Report(mask.node, f"{name} hides where it is True, and this mask is True at words: invert it")
    for event in filter(facts.is_judged, [*facts.operations("sdpa"), *facts.applied(*LAYERS)]):
        name = f"the mask of {event.name}" if facts.framework else "attn_mask of scaled_dot_product_attention"
        for mask in resolved(event.term["attn_mask"]):
            if any(_hides_words(*one) and not _is_plain(one[0]) for one in parts_that_hide(mask, False)):
                yield Report(mask.node, f"{name} shows where it is True, and this mask is True at padding: invert it")
    for site in formulas(facts):
        for step in site.before:
            for use in formula_mask(step):
                if use.added and _is_bias_at_words(use.mask):
                    yield Report(use.node.node, "this adds a large negative number at words, and hides them: invert it")
                passed_on = _is_plain(use.mask) or use.mask.op in ("cast", "bool", "unsqueeze")
                parts = [] if use.added or passed_on else list(parts_that_hide(use.mask, use.true_hides))
                wrong = next((one for one, true_hides in parts if _hides_words(one, true_hides)), None)
                if wrong is not None or (use.true_hides and not use.added and _is_called_visible(step.term)):
                    node = wrong.node if wrong is not None and len(parts) > 1 else use.node.node
                    yield Report(node, "this mask hides the words and shows the padding: invert it")


_VISIBLE = re.compile(
    r"^(is_)?(valid|keep|kept|visible|allowed|attendable|non_?pad|not_?pad|real)(_(mask|tokens|keys))?$"
)


def _is_called_visible(fill: Term) -> bool:
    """Whether `masked_fill` is given a mask that is named for what it shows, as it is."""
    written = fill.node.args if isinstance(fill.node, ast.Call) and fill.op == "masked_fill" else []
    return bool(written) and _VISIBLE.match(ast.unparse(written[0])) is not None


def _is_bias_at_words(bias: Term) -> bool:
    """Whether a bias is a mask that is 1 at words, or 1 minus one of padding, times a number that hides."""
    bias = through(bias, "unsqueeze", "item", "expand", "cast")
    for mask, factor in sides(bias) if bias.op == "mul" else ():
        if hides(factor):
            at = "" if _is_plain(mask) else "words"
            mask = through(mask, "unsqueeze", "item", "expand", "cast")
            if mask.op == "sub" and number(mask.input) == 1:
                mask, at = mask["other"], "padding"
            return bool(at) and true_at(mask) == at
    return False


def _hides_words(mask: Term, true_hides: bool) -> bool:
    return true_at(mask) == ("words" if true_hides else "padding")


def _is_plain(mask: Term) -> bool:
    """Whether a mask is passed on as it came: it may have been inverted before, and has the axes of all pairs."""
    return mask.op in ("parameter", "attribute")


_PAD_NAMES = re.compile(r"(^|_)pad(ding)?(_|$)|pad_?(id|idx|token|index)", re.I)
_TOKENS = re.compile(r"^((input|src|tgt|source|target|text|word|token)_)?(ids|tokens|words)$")
"""Names of token ids, of which 0 is the padding where they are compared with it."""
_OPPOSITE = {"words": "padding", "padding": "words", "": ""}


def true_at(mask: Term) -> str:
    """Where a padding mask is True: "words", "padding", or "" if that is not plain."""
    converted = mask.op == "method" and mask.value in ("long", "int", "byte")
    if converted or mask.op in ("unsqueeze", "expand", "reshape", "item", "repeat", "cast", "bool", "transpose"):
        return true_at(mask.input)
    if mask.op in ("invert", "not"):
        return _OPPOSITE[true_at(mask.input)]
    left, right = mask["input"], mask["other"]
    if mask.op in ("equal", "not_equal"):
        known = (one for one in (left, right) if one.op in ("parameter", "attribute", "name", "constant"))
        if any(_PAD_NAMES.search(label(one)) for one in known):
            return "padding" if mask.op == "equal" else "words"
        if number(right) == 0 and left.op == "parameter" and _TOKENS.search(str(left.value)):
            return "padding" if mask.op == "equal" else "words"
        same = (number(right) == 1) == (mask.op == "equal")
        where = true_at(left) if number(right) in (0, 1) else ""
        return where if same else _OPPOSITE[where]
    if mask.op in _OUTSIDE and is_counted(left) and _is_of_lengths(right):
        return _OUTSIDE[mask.op]
    if mask.op in ("less", "greater") and is_counted(right) and _is_of_lengths(left):
        return _OPPOSITE[_OUTSIDE[mask.op]]
    return "words" if mask.op in ("parameter", "attribute") and mask.value == "attention_mask" else ""


_OUTSIDE = {"greater_equal": "padding", "less": "words", "greater": "padding", "less_equal": "words"}
"""Where a comparison of counted positions with lengths is True."""


def _is_of_lengths(term: Term) -> bool:
    term = through(term, "unsqueeze", "item", "expand", "cast", "reshape", "repeat", "floordiv", "add", "sub")
    return term.op in ("parameter", "attribute") and bool(re.search(r"(^|_)(lengths?|lens?)$", label(term)))
