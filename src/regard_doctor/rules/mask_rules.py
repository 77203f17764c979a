"""Rules about masks: which pairs are hidden, by which meaning of True, and by what value."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..array_frameworks import LAYERS
from ..attention_sites import AttentionSite, Step, dtype_of_projection, names_in, poolings
from ..finding import Severity
from ..mask_values import hidden_pairs, is_zero_one, mask_values, triangle
from ..module_facts import Event, ModuleFacts
from ..term import Term, is_none, is_true, label, number, same, through, walk
from .base import Report, comments_at, formulas, function_around, rule, target_names, tests_around

TORCH_MASKS = {
    "torch.nn.MultiheadAttention": ("attn_mask",),
    "torch.nn.TransformerEncoder": ("mask",),
    "torch.nn.TransformerEncoderLayer": ("src_mask",),
    "torch.nn.TransformerDecoder": ("tgt_mask",),
    "torch.nn.TransformerDecoderLayer": ("tgt_mask",),
    "torch.nn.Transformer": ("src_mask", "tgt_mask"),
}
"""Masks of pairs that the modules of torch take; True hides."""

PADDING_MASKS = {
    "torch.nn.MultiheadAttention": ("key_padding_mask",),
    "torch.nn.TransformerEncoder": ("src_key_padding_mask",),
    "torch.nn.TransformerEncoderLayer": ("src_key_padding_mask",),
    "torch.nn.TransformerDecoder": ("tgt_key_padding_mask", "memory_key_padding_mask"),
    "torch.nn.TransformerDecoderLayer": ("tgt_key_padding_mask", "memory_key_padding_mask"),
    "torch.nn.Transformer": ("src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
}
"""Padding masks of these modules; True hides."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskUse:
    """A mask where it takes effect: the pairs that it hides are those where it is True, or False, or very negative."""

    mask: Term
    node: Term
    true_hides: bool
    added: bool
    where: str


def mask_uses(facts: ModuleFacts) -> Iterator[MaskUse]:
    """All masks of pairs of a module: of SDPA, of the modules of torch, of formulas."""
    for event in facts.operations("sdpa"):
        mask = event.term.get("attn_mask")
        if is_judged(event, facts) and mask is not None:
            node = mask if _is_within(mask, event) else event.term
            name = str(event.term.value).rpartition(".")[2] if facts.framework else "scaled_dot_product_attention"
            yield MaskUse(mask, node, False, True, name)
    for event in facts.applied(*LAYERS):
        mask = event.term.get("attn_mask")
        if is_judged(event, facts) and mask is not None:
            yield MaskUse(mask, mask if _is_within(mask, event) else event.term, False, True, str(event.term.value))
    for event in facts.applied(*TORCH_MASKS):
        for name in TORCH_MASKS[str(event.term.value)]:
            mask = event.term.get(name)
            if is_judged(event, facts) and mask is not None:
                yield MaskUse(mask, mask, True, True, str(event.term.value).removeprefix("torch."))
    for site in formulas(facts):
        for step in site.before:
            yield from formula_mask(step)


def _is_within(mask: Term, event: Event) -> bool:
    """Whether a mask is made in the function that passes it, not in a helper."""
    first, last = getattr(event.function, "lineno", 0), getattr(event.function, "end_lineno", None) or 0
    return event.function is None or first <= getattr(mask.node, "lineno", 0) <= last


def is_judged(event: Event, facts: ModuleFacts) -> bool:
    """Whether an event is not one that the callers of its function, in the same file, tell more about."""
    return event.depth > 0 or event.function not in facts.followed


def formula_mask(step: Step) -> Iterator[MaskUse]:
    """The use of a mask in one step of a formula, where the step is one."""
    if step.op in ("masked_fill", "setitem") and step.operand is not None and _hides(step.term.get("value")):
        yield MaskUse(step.operand, step.term, True, False, "the softmax")
    elif step.op == "where" and step.operand is not None and _hides(step.operand):
        condition = step.term.get("condition")
        if condition is not None:
            yield MaskUse(condition, step.term, step.operand is step.term.get("input"), False, "the softmax")
    elif step.op == "add" and step.operand is not None and number(step.operand) is None:
        yield MaskUse(step.operand, step.term, False, True, "the softmax")


def _hides(value: Term | None) -> bool:
    found = fill_value(value)
    return found is not None and found < -90


def fill_value(value: Term | None) -> float | None:
    """The number that a mask fills in; that of `finfo(...).min` is minus infinity."""
    if value is None:
        return None
    if value.op == "attribute" and value.value == "min" and any("finfo" in str(one.value) for one in walk(value)):
        return -math.inf
    if value.op == "negative" and value.input.op == "attribute" and value.input.value == "max":
        return -math.inf if any("finfo" in str(one.value) for one in walk(value)) else None
    if value.op == "call" and value.items:
        return fill_value(value.items[0]) if "tensor" in str(value.value) else number(value)
    if value.op in ("full", "full_like"):
        return fill_value(value.get("fill_value"))
    return number(value)


def resolved(mask: Term) -> Iterator[Term]:
    """A mask, or the alternatives of which one is used."""
    if mask.op == "choice":
        for one in mask.items:
            yield from resolved(one)
    elif not is_none(mask):
        yield mask


@rule("ATT201", Severity.ERROR)
def inverted_causal_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the past instead of the future."""
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is None or (use.added is False and values.dtype != bool and not _boolean(mask)):
                continue
            if is_zero_one(values) and use.added:
                continue
            hidden = hidden_pairs(values if use.added else values.astype(bool), true_hides=use.true_hides)
            found = triangle(hidden)
            if found in ("past", "past and self"):
                meaning = "ignore" if use.true_hides else "attend"
                reason = f"; to {use.where}, True means {meaning}" if values.dtype == bool else ""
                yield Report(use.node.node, f"this mask hides the past and shows the future{reason}: invert it")


def _uses_that_hide(what: str, facts: ModuleFacts) -> Iterator[MaskUse]:
    """The uses of masks that hide these pairs, in the words of `triangle`; one for each value of a mask."""
    for use in mask_uses(facts):
        for mask in resolved(use.mask):
            values = mask_values(mask)
            if values is None or (is_zero_one(values) and use.added):
                continue
            if triangle(hidden_pairs(values if use.added else values.astype(bool), true_hides=use.true_hides)) == what:
                yield use


def _boolean(mask: Term) -> bool:
    return mask.op in ("equal", "not_equal", "less", "greater", "bool", "invert", "less_equal", "greater_equal")


@rule("ATT202", Severity.ERROR)
def numeric_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of the numbers 0 and 1 is added to the scores, so that it hides nothing."""
    for use in mask_uses(facts):
        alternatives = list(resolved(use.mask))
        if len(alternatives) > 1 and any(_is_filled(one) for one in alternatives):
            continue  # converted under a condition, which may always be true of it
        in_formula = use.where == "the softmax"  # where booleans are numbers
        for mask in (part for one in alternatives for part in _summands(one)):
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
    return any(
        _hides(one.get("value") if one.op == "masked_fill" else one.get("other"))
        for one in walk(mask)
        if one.op in ("masked_fill", "where")
    )


def _summands(mask: Term) -> Iterator[Term]:
    """A mask, and what it is the sum of."""
    yield mask
    if mask.op == "add":
        for one in mask.operands():
            yield from _summands(one)


def _is_broadcast_padding(mask: Term) -> bool:
    """Whether a mask is a parameter of (batch, keys) with axes inserted for heads and queries, as it came."""
    inserted = sum(is_none(one) for one in mask.items) if mask.op == "item" else 0
    return inserted == 2 and mask.input.op == "parameter" and not is_none(mask.items[-1])


def _is_integer(dtype: Term | None) -> bool:
    return dtype is not None and dtype.op == "name" and not str(dtype.value).startswith("torch.float")


def _is_float_comparison(mask: Term, *, plain: bool = False) -> bool:
    """Whether a mask is a comparison, which is boolean, converted to numbers; `plain`: or not converted."""
    mask = through(mask, "unsqueeze", "expand", "reshape", "item", "repeat")
    if mask.op == "cast" and _is_broadcast_padding(mask.input) and not _is_integer(mask.get("dtype")):
        return True
    converted = mask.op == "cast" and str(getattr(mask.get("dtype"), "value", "")).startswith("torch.float")
    if not converted and not (plain and mask.op in ("equal", "not_equal", "bool")):
        return False
    inner = mask.input if converted else mask
    inner = through(inner, "unsqueeze", "expand", "reshape", "item", "repeat", "invert")
    return inner.op in ("equal", "not_equal", "less", "greater", "less_equal", "greater_equal", "bool")


@rule("ATT203", Severity.ERROR)
def hidden_diagonal(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask hides the position itself, so that the first query attends to nothing."""
    for use in _uses_that_hide("future and self", facts):
        yield Report(
            use.node.node,
            "this causal mask hides the diagonal too: the first position attends to nothing; start at diagonal=1",
        )


@rule("ATT215", Severity.ERROR)
def visible_next_position(facts: ModuleFacts) -> Iterator[Report]:
    """A causal mask leaves the next position visible."""
    for use in _uses_that_hide("future but the next", facts):
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
            yield Report(event.term.node, "this causal mask shows each position the next one: fill triu(diagonal=1)")


@rule("ATT204", Severity.ERROR)
def zero_times_infinity(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of 0 and 1 is multiplied by infinity: 0 · inf is NaN."""
    for event in facts.operations("mul"):
        left, right = event.term.get("input"), event.term.get("other")
        if left is None or right is None:
            continue
        for factor, other in ((left, right), (right, left)):
            plain = number(factor)
            if plain is not None and math.isinf(plain) and number(other) is None and _has_zeros(other):
                yield Report(event.term.node, "0 · inf is NaN: use masked_fill with -inf, or torch.where")
                break


def _has_zeros(term: Term) -> bool:
    """Whether a factor is a mask that has zeros, by its values, its name or how it is computed."""
    values = mask_values(term)
    if values is not None:
        return bool((values == 0).any())
    if term.op == "sub" and number(term.get("input")) == 1:
        return True
    if term.op in ("equal", "not_equal", "bool", "invert", "triu", "tril"):
        return True
    return term.op == "cast" and _has_zeros(term.input)


@rule("ATT205", Severity.ERROR)
def mask_that_hides_nothing(facts: ModuleFacts) -> Iterator[Report]:
    """Hidden scores are set to a number that the softmax does not ignore."""
    for site in formulas(facts):
        for step in site.before:
            value = step.term.get("value") if step.op in ("masked_fill", "setitem") else None
            if step.op == "where":
                value = step.operand
            found = fill_value(value)
            if any(_hides(other.term.get("value")) for other in site.before if other is not step):
                continue  # hidden before, and rows without any visible key made finite
            if found is not None and found > -30:
                yield Report(
                    step.term.node, f"hidden scores are set to {found:g}, which the softmax does not ignore: use -inf"
                )


@rule("ATT206", Severity.ERROR)
def multiplied_mask(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are multiplied by a mask before the softmax."""
    for site in formulas(facts):
        others = [step for step in site.masks() if step.op != "mul"]
        for step in site.before:
            if step.op != "mul" or step.operand is None or others:
                continue
            values = mask_values(step.operand)
            if (values is not None and is_zero_one(values)) or is_mask_name(step.operand):
                yield Report(
                    step.term.node,
                    "scores are multiplied by a mask: a score of 0 is not hidden; fill with -inf where the mask is 0",
                )
    for scaled in _multiplied_before_softmax(facts):
        yield Report(scaled.node, "scores are multiplied by a mask: a score of 0 is not hidden; fill with -inf")


def _multiplied_before_softmax(facts: ModuleFacts) -> Iterator[Term]:
    """Products of other scores with a mask whose softmax is not masked afterwards, as by a second product."""
    formulas_of = {id(site.softmax) for site in facts.sites}
    for event in facts.operations("softmax"):
        scaled = event.term.input
        operands = [one for one in (scaled.get("input"), scaled.get("other")) if one is not None]
        masks = [one for one in operands if is_mask_name(one)]
        again = any(one.op in ("mul", "masked_fill", "where") for one in facts.consumers.get(id(event.term), []))
        if scaled.op == "mul" and len(masks) == 1 and not again and id(event.term) not in formulas_of:
            yield scaled


def is_mask_name(term: Term) -> bool:
    """Whether a value is named as a mask of pairs or of keys; masks of heads are others."""
    term = through(term, "unsqueeze", "expand", "cast", "item", "reshape", "rearrange")
    name = str(term.value) if term.op in ("parameter", "attribute", "name") else ""
    return "head" not in name and bool(
        re.search(r"(^|_)(attn|attention|causal|src|tgt|trg|padding|pad|key)?_?mask$", name)
    )


def _is_mask_of_weights(mask: Term) -> bool:
    """Whether weights are multiplied by a mask: of zeros and ones, by its name, or a comparison of positions.

    One with a last axis of 1 hides queries, whose outputs it makes 0: no mask of keys.
    """
    if mask.op == "unsqueeze" and number(mask.get("dim")) == -1:
        return False
    while mask.op in ("equal", "not_equal", "invert", "cast", "unsqueeze", "item", "rearrange", "bool"):
        if _true_at(mask):
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
            mask = step.get("mask") if step.op == "masked_fill" else None
            if step.op == "mul":
                mask = step.get("other") if step.input is inner else step.input
            if mask is not None and _is_mask_of_weights(mask):
                yield Report(step.node, message)
            inner = step


@rule("ATT208", Severity.ERROR)
def inverted_padding_mask(facts: ModuleFacts) -> Iterator[Report]:
    """A padding mask hides the words and shows the padding."""
    for event in facts.applied(*PADDING_MASKS):
        for name in PADDING_MASKS[str(event.term.value)]:
            for mask in resolved(event.term.get(name) or Term("constant", event.term.node)):
                inner = mask
                inner = through(inner, "cast", "bool")
                if is_judged(event, facts) and not _is_plain(inner) and _true_at(mask) == "words":
                    yield Report(mask.node, f"{name} hides where it is True, and this mask is True at words: invert it")
    for event in [*facts.operations("sdpa"), *facts.applied(*LAYERS)]:
        for mask in resolved(event.term.get("attn_mask") or Term("constant", event.term.node)):
            wrong = any(_hides_words(*one) and not _is_plain(one[0]) for one in _parts(mask, False))
            if is_judged(event, facts) and wrong:
                name = f"the mask of {str(event.term.value).rpartition('.')[2]}" if facts.framework else _OF_TORCH
                yield Report(mask.node, f"{name} shows where it is True, and this mask is True at padding: invert it")
    for site in formulas(facts):
        for step in site.before:
            for use in formula_mask(step):
                passed_on = _is_plain(use.mask) or use.mask.op in ("cast", "bool", "unsqueeze")
                parts = [] if use.added or passed_on else list(_parts(use.mask, use.true_hides))
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


_OF_TORCH = "attn_mask of scaled_dot_product_attention"


def _hides_words(mask: Term, true_hides: bool) -> bool:
    return _true_at(mask) == ("words" if true_hides else "padding")


def _is_plain(mask: Term) -> bool:
    """Whether a mask is passed on as it came: it may have been inverted before, and has the axes of all pairs."""
    return mask.op in ("parameter", "attribute")


_PAD_NAMES = re.compile(r"(^|_)pad(ding)?(_|$)|pad_?(id|idx|token|index)", re.I)
_OPPOSITE = {"words": "padding", "padding": "words", "": ""}


def _true_at(mask: Term) -> str:
    """Where a padding mask is True: "words", "padding", or "" if that is not plain."""
    converted = mask.op == "method" and mask.value in ("long", "int", "byte")
    if converted or mask.op in ("unsqueeze", "expand", "reshape", "item", "repeat", "cast", "bool", "transpose"):
        return _true_at(mask.input)
    if mask.op in ("invert", "not"):
        return _OPPOSITE[_true_at(mask.input)]
    if mask.op in ("equal", "not_equal"):
        left, right = mask.get("input"), mask.get("other")
        if left is None or right is None:
            return ""
        known = ("parameter", "attribute", "name", "constant")
        if any(_PAD_NAMES.search(label(one)) for one in (left, right) if one.op in known):
            return "padding" if mask.op == "equal" else "words"
        if number(right) in (0, 1) and _true_at(left):
            same = (number(right) == 1) == (mask.op == "equal")
            return _true_at(left) if same else _OPPOSITE[_true_at(left)]
        return ""
    if mask.op in _OUTSIDE:
        left, right = mask.get("input"), mask.get("other")
        if left is not None and right is not None:
            if _is_counted(left) and _is_of_lengths(right):
                return _OUTSIDE[mask.op]
            if _is_counted(right) and _is_of_lengths(left):
                return _OPPOSITE[_OUTSIDE[mask.op]] if mask.op in ("less", "greater") else ""
        return ""
    named = str(mask.value) if mask.op in ("parameter", "attribute") else ""
    return "words" if named == "attention_mask" else ""


_OUTSIDE = {"greater_equal": "padding", "less": "words", "greater": "padding", "less_equal": "words"}
"""Where a comparison of counted positions with lengths is True."""


def _is_counted(term: Term) -> bool:
    term = through(term, "unsqueeze", "item", "expand", "cast", "reshape", "repeat")
    return term.op == "arange"


def _is_of_lengths(term: Term) -> bool:
    term = through(term, "unsqueeze", "item", "expand", "cast", "reshape", "repeat", "floordiv", "add", "sub")
    return term.op in ("parameter", "attribute") and bool(re.search(r"(^|_)(lengths?|lens?)$", label(term)))


def _parts(mask: Term, true_hides: bool) -> Iterator[tuple[Term, bool]]:
    """The conditions that hide a key by themselves, each with whether it hides where it is True."""
    if mask.op in ("invert", "not"):
        yield from _parts(mask.input, not true_hides)
    elif mask.op in ("unsqueeze", "expand", "bool", "carried"):
        yield from _parts(mask.input, true_hides)
    elif mask.op == ("or" if true_hides else "and"):
        for one in mask.operands():
            yield from _parts(one, true_hides)
    else:
        yield mask, true_hides


@rule("ATT211", Severity.ERROR)
def causal_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """`is_causal=True` with keys of a cache: the triangle starts at the first key."""
    for event in facts.operations("sdpa"):
        key = event.term.get("key")
        if not is_judged(event, facts) or key is None or not is_true(event.term.get("is_causal")):
            continue
        without = is_without_cache(event.term.node, facts) or _is_of_equal_lengths(event.term.node, facts)
        if is_cached(key) and not without and not _is_without_mask_of_caller(event, facts):
            yield Report(
                event.term.node,
                "is_causal=True aligns the triangle with the first key, and these keys begin with those of a cache: "
                "pass a mask aligned to the last key",
            )


def _is_of_equal_lengths(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node is reached only where two sizes that its function has read are equal, as those of a prompt are."""
    function = function_around(node, facts)
    sizes = {
        name
        for one in (ast.walk(function) if function is not None else ())
        if isinstance(one, ast.Assign) and re.search(r"\.(size\(|shape\[)", ast.unparse(one.value))
        for name in target_names(one)
    }
    compared = (
        [one.left, *one.comparators]
        for test in tests_around(node, facts)
        for one in ast.walk(test)
        if isinstance(one, ast.Compare) and isinstance(one.ops[0], ast.Eq)
    )
    return any(all(isinstance(side, ast.Name) and side.id in sizes for side in sides) for sides in compared)


def _is_without_mask_of_caller(event: Event, facts: ModuleFacts) -> bool:
    """Whether it depends on a parameter named as a mask whether a call is made."""
    function = function_around(event.term.node, facts)
    parameters = (
        {one.arg for one in (*function.args.args, *function.args.kwonlyargs)} if function is not None else set()
    )
    return any(
        isinstance(one, ast.Name) and one.id in parameters and re.search(r"mask|bias", one.id)
        for test in tests_around(event.term.node, facts)
        for one in ast.walk(test)
    )


_MOVED = frozenset({"transpose", "reshape", "flatten", "expand", "repeat_interleave", "cast", "unsqueeze", "item"})
CACHE_NAMES = re.compile(r"past|cache|prev(ious)?_|memory_k|k_?cache|history", re.I)


def is_without_cache(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node stands in the branch of a condition that is taken where there is no cache, or none is allowed."""
    function = function_around(node, facts)
    asserted = [one.test for one in ast.walk(function) if isinstance(one, ast.Assert)] if function is not None else []
    if any(re.search(r"\bis None$", test := ast.unparse(one)) and CACHE_NAMES.search(test) for one in asserted):
        return True
    while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        above = facts.parents.get(node)
        if above is None:
            return False
        if isinstance(above, ast.If) and node is not above.test:
            test = ast.unparse(above.test)
            negated = re.search(r"^not |is None|== 0", test) is not None
            if CACHE_NAMES.search(test) and (node in above.body) == negated:
                return True
        node = above
    return False


def is_cached(key: Term) -> bool:
    """Whether keys are, on some path, joined from those of a cache and new ones."""
    for _ in range(30):
        if key.op == "cat":
            joined = key.get("tensors")
            if joined is None or not joined.items or number(key.get("dim")) == -1:  # features, as rotated halves are
                return False
            if joined.items[0].op in ("add", "sub", "mul", "negative"):  # such halves too, by a cached table
                return False
            stored = joined.items[0].op in ("item", "loop_item") and not any(
                one.op in ("apply", "matmul") for one in walk(joined.items[0])
            )
            return (
                _names_a_cache(joined.items[0])
                or (stored and any(one.op == "attribute" for one in walk(joined.items[0])))
                or _is_stored_key(joined.items[0])
            )
        if key.op == "setitem":
            return _is_written_part(key)
        if key.op == "choice":
            return any(is_cached(one) for one in key.items)
        if key.op in ("element", "item") and key.input.op == "method":
            return key.input.value in _CACHE_METHODS and _names_a_cache(key.input.input)
        if key.op in _MOVED:
            key = key.input
        else:
            return False
    return False


_CACHE_METHODS = ("update", "extend", "append", "add", "concat", "put", "store", "push")
"""Methods of a cache that return the keys and values of all calls."""


def _is_stored_key(term: Term) -> bool:
    """Whether keys are an attribute that methods change, of an object: those of the calls before."""
    return term.op == "attribute" and term.input.op in ("instance", "self") and bool(re.search(r"key|^k$", label(term)))


def _is_written_part(changed: Term) -> bool:
    """Whether new keys are written into a part of a longer tensor."""
    index = changed.get("index")
    parts = () if index is None else index.items if index.op == "tuple" else (index,)
    if parts and parts[0].op == "constant" and parts[0].value is ... and len(parts) == 2:
        return False  # features: halves that are rotated
    return any(one.op == "slice" and not is_none(one.items[0]) and number(one.items[0]) is None for one in parts)


def _names_a_cache(term: Term) -> bool:
    return any(CACHE_NAMES.search(name) for name in names_in(term))


@rule("ATT221", Severity.WARNING)
def finite_mask_value(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are hidden by a finite number, which half precision cannot hold or scores can outgrow."""
    reports = list(_finite_values(facts))
    reasoned = {found for found, report in reports if _gives_reason(report.node, facts)}
    yield from (report for found, report in reports if found not in reasoned)


_REASON = re.compile(r"\b(nan|inf|infinity|overflow\w*|underflow\w*|fp16|float16|half|bf16|bfloat16|finite)\b", re.I)


def _gives_reason(node: ast.AST, facts: ModuleFacts) -> bool:
    return any(_REASON.search(comment) for comment in comments_at(node, facts))


def _finite_values(facts: ModuleFacts) -> Iterator[tuple[float, Report]]:
    """The finite numbers that scores are hidden by, with what is wrong with each."""
    for site in formulas(facts):
        for step in site.before:
            value = step.term.get("value") if step.op in ("masked_fill", "setitem") else None
            if step.op == "where":
                value = step.operand
            node = step.term.node
            if step.op == "add" and step.operand is not None:
                value, node = _finite_number(step.operand)
            filled = value is not None and value.op in ("full", "full_like")
            found = number(value.get("fill_value") if value is not None and filled else value)
            if found is None or not -math.inf < found <= -30 or _hides_rows(step):
                continue
            if value is not None and _is_chosen_elsewhere(value, step, facts):
                continue
            if found > -65504 and _is_hidden_again(step, site):
                continue
            if found < -65504 and (_is_single(step, site) or _is_single_mask(step)):
                continue
            if found < -65504:
                reason = "which overflows in float16"
            elif found > -20000:
                reason = "which scores can outgrow"
            else:
                continue
            held = found < -1e37 and step.op in ("add", "where")
            held |= found < -65504 and "numpy" in facts.imports.values() and not _HALF.search(facts.source)
            unless = "scores are never float16, or the number becomes -inf there" if held else ""
            yield found, Report(node, _finite_message(found, reason), unless=unless)
    for pooled in poolings(facts):
        for one in pooled.before():
            found = _outgrown(one)
            if found is not None:
                yield found, Report(one.node, _finite_message(found))
    for event in facts.operations("mul"):  # masks that are made for several layers
        if _is_stored_as_mask(event, facts) and any(_is_truth_value(one) for one in event.term.operands()):
            found = next((one for one in map(number, event.term.operands()) if one is not None), None)
            if found is not None and -20000 < found <= -30:
                yield found, Report(event.term.node, _finite_message(found))


_HALF = re.compile(r"torch|tensor|jax|paddle|mindspore", re.I)
"""Names of what computes in half precision; the arrays of numpy are float64."""


def _finite_message(found: float, reason: str = "which scores can outgrow") -> str:
    return f"scores are hidden by {found:g}, {reason}: fill with -inf, or finfo.min where a row may see no key"


def _is_chosen_elsewhere(value: Term, step: Step, facts: ModuleFacts) -> bool:
    """Whether a number comes from another function, of which the text says that it is chosen so."""
    helper = function_around(value.node, facts)
    written = ast.get_source_segment(facts.source, helper) if helper is not None else None
    other = helper is not function_around(step.term.node, facts)
    return other and written is not None and re.search(r"\b(deliberate|intentional)(ly)?\b", written, re.I) is not None


def _hides_rows(step: Step) -> bool:
    """Whether whole rows are set to a number, of queries that nothing reads: `scores[padded, :] = -1e4`."""
    index = step.term.get("index") if step.op == "setitem" else None
    last = index.items[-1] if index is not None and index.op == "tuple" and index.items else None
    return last is not None and last.op == "slice" and all(is_none(one) for one in last.items)


def _is_hidden_again(step: Step, site: AttentionSite) -> bool:
    """Whether the weights of the pairs that a step hides are set to 0 after the softmax."""
    hidden = step.term.get("mask")
    return any(
        (one.op == "masked_fill" and same(one.term.get("mask"), hidden) and number(one.term.get("value")) == 0)
        or (one.op == "mul" and one.operand is not None and any("mask" in name for name in names_in(one.operand)))
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
    """Whether what a step adds is float32, as the sum with scores of half precision then is, or is converted to their
    dtype after it was filled: there the number becomes -inf.
    """
    added = step.operand if step.op == "add" else None
    while added is not None:
        if added.op == "cast":
            return _is_float32(added.get("dtype")) or added.input.op in ("masked_fill", "full", "full_like", "mul")
        operands = [one for one in (added.get("input"), added.get("other")) if one is not None and number(one) is None]
        added = operands[0] if added.op in _KEEPS_DTYPE and len(operands) == 1 else None
    return False


_KEEPS_DTYPE = frozenset({"mul", "add", "sub", "unsqueeze", "item", "expand", "transpose", "repeat", "negative"})


def _is_float32(dtype: Term | None) -> bool:
    return dtype is not None and dtype.value in ("torch.float32", "torch.float", "torch.float64", "torch.double")


def _outgrown(term: Term) -> float | None:
    """The finite number that a step fills in where it hides, if scores can be below it."""
    values = [term.get("value")] if term.op in ("masked_fill", "setitem") else []
    values += [term.get("input"), term.get("other")] if term.op == "where" else []
    found = (fill_value(one) for one in values)
    return next((one for one in found if one is not None and -20000 < one <= -30), None)


def _is_stored_as_mask(event: Event, facts: ModuleFacts) -> bool:
    """Whether a value is stored under a name of masks: as a buffer or attribute, or as the result of a function.

    Words between, as in `vocabulary_mask`, are of other masks than those of scores.
    """
    for consumer in facts.consumers.get(id(event.term), []):
        name = ""
        if consumer.op == "method" and consumer.value == "register_buffer" and consumer.items:
            name = str(consumer.items[0].value)
        elif consumer.op in ("store", "return"):
            name = str(consumer.value) if consumer.op == "store" else getattr(event.function, "name", "")
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
    if term.op == "sub" and number(term.get("input")) == 1:
        return True
    return term.op in ("equal", "not_equal", "less", "greater", "less_equal", "greater_equal")


def _finite_number(added: Term) -> tuple[Term | None, ast.AST]:
    """The number by which an added mask hides, and where it is written: (1 - mask) * -1e4, or a filled triangle."""
    stop = {"apply", "softmax", "matmul", "less", "greater", "less_equal", "greater_equal", "equal", "not_equal"}
    for one in walk(added, stop=frozenset(stop)):
        if one.op == "mul":
            found = next((factor for factor in one.operands() if number(factor) is not None), None)
        else:
            found = one.get("fill_value") if one.op == "full" else one.get("value") if one.op == "masked_fill" else None
        plain = number(found)
        if plain is not None and -math.inf < plain <= -30:
            return found, one.node
    return None, added.node
