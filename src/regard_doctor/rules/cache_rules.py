"""Rules about masks that depend on a path: with a cache and without, fused and written out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, Step, names_in
from ..finding import Severity
from ..mask_values import hidden_triangle
from ..module_facts import Event, ModuleFacts
from ..python_syntax import below, code_of, names_below, parameters, target_names
from ..term import ABSENT, Term, is_none, is_true, number, same, through, walk
from .base import Report, rule
from .cached_keys import CACHE_NAMES, is_cached, is_without_cache
from .mask_uses import resolved, site_masks


@rule("ATT211", Severity.ERROR)
def causal_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """`is_causal=True` with keys of a cache: the triangle starts at the first key."""
    for event in facts.judged("sdpa"):
        if not is_true(event.term["is_causal"]) or not is_cached(event.term["key"]):
            continue
        without = is_without_cache(event.node, facts) or _is_of_equal_lengths(event.node, facts)
        if not without and not _is_without_mask_of_caller(event, facts):
            yield Report(
                event.node,
                "is_causal=True aligns the triangle with the first key, and these keys begin with those of a cache: "
                "pass a mask aligned to the last key",
            )


def _is_of_equal_lengths(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node is reached only where two sizes that its function has read are equal, as those of a prompt are."""
    read = (one for one in facts.beside(node, ast.Assign) if re.search(r"\.(size\(|shape\[)", ast.unparse(one.value)))
    sizes = {name for one in read for name in target_names(one)}
    compared = (one for test in facts.tests_around(node) for one in below(test, ast.Compare))
    equal = ([one.left, *one.comparators] for one in compared if isinstance(one.ops[0], ast.Eq))
    return any(all(isinstance(side, ast.Name) and side.id in sizes for side in sides) for sides in equal)


def _is_without_mask_of_caller(event: Event, facts: ModuleFacts) -> bool:
    """Whether it depends on a parameter named as a mask whether a call is made."""
    masks = {one.arg for one in parameters(facts.function_around(event.node)) if re.search("mask|bias", one.arg)}
    return any(masks & names_below(test) for test in facts.tests_around(event.node))


@rule("ATT212", Severity.HINT)
def unmasked_with_cache(facts: ModuleFacts) -> Iterator[Report]:
    """The causal mask is left out whenever there is a cache, for several new tokens too."""
    for event in facts.judged("sdpa"):
        unmasked = is_none(event.term["attn_mask"]) and _is_without_cache(event.term["is_causal"])
        if unmasked and is_cached(event.term["key"]) and not _says_one_query(event.node, facts):
            yield Report(event.node, "with a cache nothing is masked: several new tokens see each other's future")
    attending = {facts.function_around(event.node) for event in facts.operations("softmax", "sdpa")}
    for node in facts.nodes[ast.If]:
        masks = not node.orelse and _tests_no_cache(node.test) and any(map(_masks_scores, node.body))
        if masks and facts.function_around(node) in attending and not _says_one_query(node, facts):
            yield Report(node, "with a cache no mask is applied: several new tokens see each other's future")


_ONE_QUERY = re.compile(
    r"#.*\b((incremental|single|one|last|1) (new )?(token|query|position|step)|incremental(ly)? decod)"
    r"|\bassert .*== 1\b|#.*== 1\b",
    re.I,
)


def _says_one_query(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether the text of the function around says that there is one query with a cache."""
    return _ONE_QUERY.search(facts.text_around(node)) is not None


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
    return _MASKED_SCORES.match(ast.unparse(statement)) is not None


_MASKED_SCORES = re.compile(
    r"(?s)(\w*(scores?|att\w*|weights|logits|energy|sim|dots)\w*)(\[.*\])? \+?= (?=.*(mask|causal|tri[lu]))"
)


@rule("ATT213", Severity.ERROR)
def triangle_from_first_key(facts: ModuleFacts) -> Iterator[Report]:
    """The triangle of a causal mask starts at the first key, and these keys begin with those of a cache."""
    for site in facts.sites:
        for mask, node in site_masks(site) if is_cached(site.key) else ():
            for one in (part for made in resolved(mask) for part in _joined(made)):
                if _starts_at_first_key(one) and not is_without_cache(one.node, facts):
                    yield Report(node.node, "this triangle starts at the first key, a cached one: align it to the last")
    for event in facts.judged("triu", "tril"):
        if _is_longer_by_a_cache(event.term):
            one_query = re.search(r"if [^\n]* == 1:", code_of(facts.function_around(event.node)))
            yield Report(
                event.node,
                "this triangle has the keys of a cache before its own, and starts at the first of them",
                unless="several new tokens never follow a cache" if one_query else "",
            )


def _is_longer_by_a_cache(made: Term) -> bool:
    """Whether a triangle of a fixed diagonal has as many columns as rows, and those of a cache."""
    sizes = _sizes(made.input)
    fixed = "diagonal" not in made.arguments or number(made["diagonal"]) is not None
    if not fixed or len(sizes) != 2 or sizes[1].op != "add":
        return False
    others = [one for one in sizes[1].operands() if not same(one, sizes[0])]
    names = names_in(others[0]) if len(others) == 1 and len(sizes[1].arguments) == 2 else set()
    return any(re.search(r"past|cache|mem|offset|start|prev", name) for name in names)


def _joined(mask: Term) -> Iterator[Term]:
    """A mask, or those that are joined by *and* to it."""
    if mask.op != "and":
        yield mask
    for one in mask.operands() if mask.op == "and" else ():
        yield from _joined(one)


_MADE = frozenset({"ones", "full", "zeros", "size"})
"""Where a walk over a mask stops: sizes are of other tensors."""


def _starts_at_first_key(mask: Term) -> bool:
    """Whether a mask is a triangle over other numbers of queries and keys, with its corner at the first of both."""
    if hidden_triangle(mask, true_hides=True, as_booleans=True) not in ("future", "past and self"):
        return False
    made = list(walk(mask, stop=_MADE))
    cuts = [[part for part in one.items if part.op == "slice"] for one in made if one.op == "item"]
    for one in made:
        cut = [part for part in one.items if part.op == "slice"][-2:] if one.op == "item" else []
        if len(cut) == 2 and all(is_none(part.items[0]) or number(part.items[0]) == 0 for part in cut):
            return not same(cut[0].items[1], cut[1].items[1]) and not is_none(cut[0].items[1])
        if one.op in ("triu", "tril"):
            sizes, is_cut = _sizes(one.input), any(not is_none(part.items[1]) for parts in cuts for part in parts)
            return len(sizes) == 2 and not same(*sizes) and not is_cut
    return False


def _sizes(made: Term) -> list[Term]:
    made = through(made, "cast", "bool", "carried")
    return list(made["size"].items if "size" in made.arguments else made.items)[-2:]


@rule("ATT214", Severity.ERROR)
def causal_on_one_path(facts: ModuleFacts) -> Iterator[Report]:
    """One of two paths of a function is causal, and the other, of the same queries and keys, has no mask."""
    causal = [site for site in facts.sites if site.kind == "sdpa" and _may_be_causal(site.output["is_causal"])]
    for site in facts.sites if causal else ():
        of_caller = [step for step in site.masks() if _is_callers_mask(step)]
        masked = _is_causal_by_itself(site) if site.kind == "sdpa" else len(of_caller) < len(list(site.masks()))
        weighed = any(step.op in ("mul", "masked_fill") for step in site.after)
        if site.kind not in ("formula", "sdpa") or masked or weighed or _has_one_query(site.node, facts):
            continue
        paths = (other for other in _other_paths(site, causal, facts) if site.event.call is other.event.call)
        if any(_is_plain_key(site.key, other.key) for other in paths):  # not what another caller chooses
            message = "this path has no causal mask, and the other path of this function has one"
            yield Report(site.node, message, unless="the mask of the caller is causal" if of_caller else "")
    for site in facts.sites:  # a mask of the caller's, and a causal option that is left aside where there is one
        if site.kind != "sdpa" or site.output["attn_mask"].op != "parameter" or not is_none(site.output["is_causal"]):
            continue
        options = (other.output for other in _other_paths(site, causal, facts) if is_none(other.output["attn_mask"]))
        if any(not is_true(one["is_causal"]) for one in options):
            message = "with a mask, this leaves the option to be causal aside: combine both masks"
            yield Report(site.node, message, unless="callers pass a mask of both")


def _may_be_causal(flag: Term) -> bool:
    return is_true(flag) or flag.op == "attribute" or (flag.op == "parameter" and "causal" in str(flag.value))


def _other_paths(site: AttentionSite, causal: list[AttentionSite], facts: ModuleFacts) -> Iterator[AttentionSite]:
    """The causal sites of the same function and the same values."""
    function = facts.function_around(site.node)
    beside = (one for one in causal if one is not site and facts.function_around(one.node) is function)
    return (one for one in beside if same(site.value, one.value))


def _has_one_query(node: ast.AST | None, facts: ModuleFacts) -> bool:
    """Whether a condition around a node says that there is one query, as in a decoding step, which sees all keys.

    `length == 1`, `length < 2`, the other branch of `length > 1`, and what follows where that one returns.
    """
    for inner in facts.within_function(node):
        above = facts.parents.get(inner)
        body = getattr(above, "body", None)
        block = body if isinstance(body, list) else [body]
        if isinstance(above, ast.If | ast.IfExp) and inner is not above.test:
            parts = above.test.values if isinstance(above.test, ast.BoolOp) else [above.test]
            if ("==" if inner in block else "!=") in map(_compared_with_one, parts):
                return True
        before = block[: block.index(inner)] if inner in block else []
        returning = (one for one in before if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return))
        if any(_compared_with_one(one.test) == "!=" for one in returning):
            return True
    return False


def _compared_with_one(test: ast.expr) -> str:
    """What a condition says of a length: "==" that it is one, "!=" that it is more; "" where it says neither."""
    match test:
        case ast.Compare(ops=[operator], comparators=[ast.Constant(value=int(bound))]) if not isinstance(bound, bool):
            kinds = {(ast.Eq, 1): "==", (ast.LtE, 1): "==", (ast.Lt, 2): "==", (ast.NotEq, 1): "!="}
            return (kinds | {(ast.Gt, 1): "!=", (ast.GtE, 2): "!="}).get((type(operator), bound), "")
    return ""


def _is_callers_mask(step: Step) -> bool:
    """Whether a mask is used on one path only, and is a parameter as it came: no causal mask of the function's own."""
    moves = ("invert", "cast", "bool", "unsqueeze", "item", "equal", "not_equal")
    return step.conditional and through(step.operand or ABSENT, *moves).op == "parameter"


def _is_causal_by_itself(site: AttentionSite) -> bool:
    """Whether a call of SDPA has a mask that may be causal, or says whether it is."""
    return not site.output.lacks("attn_mask", "is_causal", "**")


def _is_plain_key(key: Term, other: Term) -> bool:
    return same(through(key, "transpose", "cast"), through(other, "transpose", "cast"))
