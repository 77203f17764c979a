"""Rules about masks that depend on a path: with a cache and without, fused and written out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, Step, names_in
from ..finding import Severity
from ..mask_values import hidden_pairs, mask_values, triangle
from ..module_facts import Event, ModuleFacts
from ..term import Term, is_none, is_true, number, same, text, through, walk
from .base import (
    Report,
    code_of,
    function_around,
    names_below,
    parameters,
    rule,
    target_names,
    tests_around,
    text_around,
    within_function,
)
from .cached_keys import CACHE_NAMES, is_cached, is_without_cache
from .mask_uses import resolved, site_masks


@rule("ATT211", Severity.ERROR)
def causal_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """`is_causal=True` with keys of a cache: the triangle starts at the first key."""
    for event in facts.operations("sdpa"):
        key = event.term.get("key")
        if not facts.is_judged(event) or key is None or not is_true(event.term.get("is_causal")):
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
    sizes = {
        name
        for one in ast.walk(function_around(node, facts) or node)
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
    masks = {one.arg for one in parameters(function_around(event.term.node, facts)) if re.search("mask|bias", one.arg)}
    return any(masks & names_below(test) for test in tests_around(event.term.node, facts))


@rule("ATT212", Severity.HINT)
def unmasked_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """The causal mask is left out whenever there is a cache, for several new tokens too."""
    for event in facts.operations("sdpa"):
        key, causal = event.term.get("key"), event.term.get("is_causal")
        if key is None or causal is None or not facts.is_judged(event) or not is_none(event.term.get("attn_mask")):
            continue
        if is_cached(key) and _is_without_cache(causal) and not _says_one_query(event.term.node, facts):
            yield Report(event.term.node, "with a cache nothing is masked: several new tokens see each other's future")
    attending = {function_around(event.term.node, facts) for event in facts.operations("softmax", "sdpa")}
    for node in facts.nodes[ast.If]:
        if (
            function_around(node, facts) in attending
            and _tests_no_cache(node.test)
            and not node.orelse
            and any(_masks_scores(one) for one in node.body)
            and not _says_one_query(node, facts)
        ):
            yield Report(node, "with a cache no mask is applied: several new tokens see each other's future")


_ONE_QUERY = re.compile(
    r"#.*\b((incremental|single|one|last|1) (new )?(token|query|position|step)|incremental(ly)? decod)"
    r"|\bassert .*== 1\b|#.*== 1\b",
    re.I,
)


def _says_one_query(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether the text of the function around says that there is one query with a cache."""
    return _ONE_QUERY.search(text_around(node, facts)) is not None


def _is_without_cache(causal: Term) -> bool:
    """Whether a flag is true without a cache, or with as many queries as keys, whatever the number of queries is."""
    if causal.op == "is_none":
        return any(CACHE_NAMES.search(name) for name in names_in(causal.input))
    if causal.op == "choice":
        return {True, False} == {one.value for one in causal.items if one.op == "constant"}
    sides = [one.op for one in causal.operands()] if causal.op == "equal" else []
    return "size" in sides and set(sides) <= {"size", "attribute", "add"}


def _tests_no_cache(test: ast.expr) -> bool:
    """Whether a condition is that there is no cache, and nothing else."""
    written = ast.unparse(test)
    return "mask" not in written and bool(  # a cache of masks is another
        re.fullmatch(r"(not (self\.)?use_cache|[\w.]*(cache|past)[\w.]*( is None| == 0))", written)
    )


def _masks_scores(statement: ast.stmt) -> bool:
    written = ast.unparse(statement)
    return bool(re.match(r"(\w*(scores?|att\w*|weights|logits|energy|sim|dots)\w*)(\[.*\])? \+?= ", written)) and bool(
        re.search(r"masked_fill|mask|causal|tri[lu]", written)
    )


@rule("ATT213", Severity.ERROR)
def triangle_from_first_key(facts: ModuleFacts) -> Iterator[Report]:
    """The triangle of a causal mask starts at the first key, and these keys begin with those of a cache."""
    for site in facts.sites:
        for mask, node in site_masks(site) if is_cached(site.key) else ():
            for one in (part for made in resolved(mask) for part in _joined(made)):
                if _starts_at_first_key(one) and not is_without_cache(one.node, facts):
                    yield Report(node.node, "this triangle starts at the first key, a cached one: align it to the last")
    for event in facts.operations("triu", "tril"):
        if facts.is_judged(event) and _is_longer_by_a_cache(event.term):
            one_query = re.search(r"if [^\n]* == 1:", code_of(function_around(event.term.node, facts)))
            yield Report(
                event.term.node,
                "this triangle has the keys of a cache before its own, and starts at the first of them",
                unless="several new tokens never follow a cache" if one_query else "",
            )


def _is_longer_by_a_cache(made: Term) -> bool:
    """Whether a triangle of a fixed diagonal has as many columns as rows, and those of a cache."""
    diagonal = made.get("diagonal")
    sizes = _sizes(made.input)
    if len(sizes) != 2 or sizes[1].op != "add" or (diagonal is not None and number(diagonal) is None):
        return False
    rows, added = sizes[0], list(sizes[1].operands())
    others = [one for one in added if not same(one, rows)]
    names = names_in(others[0]) if len(others) == 1 else set()
    return len(added) == 2 and any(re.search(r"past|cache|mem|offset|start|prev", name) for name in names)


def _joined(mask: Term) -> Iterator[Term]:
    """A mask, or those that are joined by *and* to it."""
    for one in mask.operands() if mask.op == "and" else (mask,):
        yield from _joined(one) if one.op == "and" else (one,)


_MADE = frozenset({"ones", "full", "zeros", "size"})
"""Where a walk over a mask stops: sizes are of other tensors."""


def _starts_at_first_key(mask: Term) -> bool:
    """Whether a mask is a triangle over other numbers of queries and keys, with its corner at the first of both."""
    values = mask_values(mask)
    if values is None or triangle(hidden_pairs(values.astype(bool), true_hides=True)) not in (
        "future",
        "past and self",
    ):
        return False
    for one in walk(mask, stop=_MADE):
        if one.op == "item":
            cut = [part for part in one.items if part.op == "slice"]
            if len(cut) >= 2 and all(is_none(part.items[0]) or number(part.items[0]) == 0 for part in cut[-2:]):
                return not same(cut[-2].items[1], cut[-1].items[1]) and not _is_open(cut[-2])
        if one.op in ("triu", "tril"):
            sizes = _sizes(one.input)
            return len(sizes) == 2 and text(sizes[0]) != text(sizes[1]) and not _is_cut(mask)
    return False


def _is_open(part: Term) -> bool:
    return is_none(part.items[1])


def _is_cut(mask: Term) -> bool:
    return any(
        one.op == "item" and any(part.op == "slice" and not _is_open(part) for part in one.items)
        for one in walk(mask, stop=_MADE)
    )


def _sizes(made: Term) -> list[Term]:
    made = through(made, "cast", "bool", "carried")
    size = made.get("size")
    sizes = list(made.items) if size is None else list(size.items)
    return sizes[-2:]


@rule("ATT214", Severity.ERROR)
def causal_on_one_path(facts: ModuleFacts) -> Iterator[Report]:
    """One of two paths of a function is causal, and the other, of the same queries and keys, has no mask."""
    causal: list[AttentionSite] = []
    for site in facts.sites:
        flag = site.output.get("is_causal") if site.kind == "sdpa" else None
        stored = flag is not None and (
            flag.op == "attribute" or (flag.op == "parameter" and "causal" in str(flag.value))
        )
        if is_true(flag) or stored:
            causal.append(site)
    for site in facts.sites:
        fused = site.kind == "sdpa"
        if site.kind not in ("formula", "sdpa"):
            continue
        masked = _is_causal_by_itself(site) if fused else any(not _is_callers_mask(step) for step in site.masks())
        if (
            masked
            or _has_one_query(site.output.node, facts)
            or any(step.op in ("mul", "masked_fill") for step in site.after)
        ):
            continue
        for other in causal:
            alike = function_around(site.output.node, facts) is function_around(other.output.node, facts) and same(
                site.value, other.value
            )
            alike = alike and site.event.call is other.event.call  # what another caller chooses is no path of this call
            if alike and other is not site and _is_plain_key(site.key, other.key):
                yield Report(
                    site.output.node,
                    "this path has no causal mask, and the other path of this function has one",
                    unless="the mask of the caller is causal"
                    if any(_is_callers_mask(step) for step in site.masks())
                    else "",
                )
                break
    for site in facts.sites:  # a mask of the caller's, and a causal option that is left aside where there is one
        mask = site.output.get("attn_mask") if site.kind == "sdpa" else None
        if mask is None or mask.op != "parameter" or not is_none(site.output.get("is_causal")):
            continue
        for other in causal:
            option = other.output.get("is_causal")
            alike = function_around(site.output.node, facts) is function_around(other.output.node, facts)
            if (
                alike
                and not is_true(option)
                and is_none(other.output.get("attn_mask"))
                and same(site.value, other.value)
            ):
                yield Report(
                    site.output.node,
                    "with a mask, this leaves the option to be causal aside: combine both masks",
                    unless="callers pass a mask of both",
                )
                break


def _has_one_query(node: ast.AST | None, facts: ModuleFacts) -> bool:
    """Whether a condition around a node says that there is one query, as in a decoding step, which sees all keys.

    `length == 1`, `length < 2`, the other branch of `length > 1`, and what follows where that one returns.
    """
    for inner in within_function(node, facts):
        above = facts.parents.get(inner)
        block = getattr(above, "body", None)
        if isinstance(above, ast.If | ast.IfExp) and inner is not above.test:
            wanted = "==" if inner in (block if isinstance(block, list) else [block]) else "!="
            parts = above.test.values if isinstance(above.test, ast.BoolOp) else [above.test]
            if any(_compared_with_one(part) == wanted for part in parts):
                return True
        before = block[: block.index(inner)] if isinstance(block, list) and inner in block else []
        returning = (one for one in before if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return))
        if any(_compared_with_one(one.test) == "!=" for one in returning):
            return True
    return False


def _compared_with_one(test: ast.expr) -> str:
    """What a condition says of a length: "==" that it is one, "!=" that it is more; "" where it says neither."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return ""
    bound = test.comparators[0]
    if not isinstance(bound, ast.Constant) or isinstance(bound.value, bool):
        return ""
    kinds = {(ast.Eq, 1): "==", (ast.LtE, 1): "==", (ast.Lt, 2): "==", (ast.NotEq, 1): "!=", (ast.Gt, 1): "!="}
    return (kinds | {(ast.GtE, 2): "!="}).get((type(test.ops[0]), bound.value), "")


def _is_callers_mask(step: Step) -> bool:
    """Whether a mask is used on one path only, and is a parameter as it came: no causal mask of the function's own."""
    mask = step.operand
    while mask is not None and mask.op in ("invert", "cast", "bool", "unsqueeze", "item", "equal", "not_equal"):
        mask = mask.input
    return step.conditional and mask is not None and mask.op == "parameter"


def _is_causal_by_itself(site: AttentionSite) -> bool:
    """Whether a call of SDPA has a mask that may be causal, or says whether it is."""
    return (
        any(not is_none(site.output.get(name)) for name in ("attn_mask", "is_causal")) or "**" in site.output.arguments
    )


def _is_plain_key(key: Term, other: Term) -> bool:
    key = through(key, "transpose", "cast")
    other = through(other, "transpose", "cast")
    return same(key, other)
