"""Rules about the scale of dot products: 1/√d once, of the head's dimension, before the softmax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import (
    SCALE_NAME,
    AttentionSite,
    DimensionPower,
    Step,
    dimension_power,
    names_in,
    product,
    scale_steps,
    source_of,
)
from ..finding import Severity
from ..module_facts import Function, ModuleFacts
from ..term import Term, exchanges_middle, is_none, label, number, sides, text, through, walk
from .base import Report, around, formulas, function_around, is_used_as_value, last_name, rule

_QUERY_NAMES = re.compile(
    r"^(q|query|queries|xq|wq|q_?proj|to_q|query_layer|q_?states?|query_states|w_?q(uery)?)$", re.I
)
_KEY_NAMES = re.compile(r"^(k|key|keys|xk|wk|k_?proj|to_k|key_layer|k_?states?|key_states|w_?k(ey)?)$", re.I)
_PROJECTIONS = frozenset({"apply"})
_BIAS_NAMES = re.compile(r"pos(ition)?_bias|rel(_|ative|$)|bias_table|alibi|slope", re.I)


@rule("ATT101", Severity.ERROR)
def missing_scale(facts: ModuleFacts) -> Iterator[Report]:
    """Dot products of queries and keys are not divided by √d."""
    for site in _free_formulas(facts):
        if (
            _looks_like_transformer(site)
            and not _may_be_scaled(site, facts)
            and not _may_get_scaled_queries(site, facts)
            and not _is_read_both_ways(site, facts)
        ):
            yield Report(
                site.scores.term.node if site.scores else site.output.node,
                "scores of queries and keys are not divided by the square root of their dimension: "
                "multiply by `dim ** -0.5` before the softmax",
                unless="these are the plain dot products of Luong's attention"
                if any(step.op in ("squeeze", "element", "item") for step in site.before) or _is_named_dot(site, facts)
                else _if_adapted(site.output.node, facts),
            )


def _is_named_dot(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the function around is named as attention by dot products, and not by scaled ones."""
    function = function_around(site.output.node, facts)
    return function is not None and re.match(r"_*dot_?(product_?)?att", function.name, re.I) is not None


_ADAPTED = re.compile(
    r"\b(adapted|adopted|borrowed|copied|modified|ported|taken|converted) from\b|official (code|impl)", re.I
)


def _if_adapted(node: ast.AST, facts: ModuleFacts) -> str:
    """The doubt about a scale where the text around says that the code is that of a published model."""
    documented = (one for one in around(node, facts) if isinstance(one, ast.Module | ast.ClassDef | Function))
    adapted = any(_ADAPTED.search(ast.get_docstring(one) or "") for one in documented)
    return "the published model that this is adapted from has that scale" if adapted else ""


def _free_formulas(facts: ModuleFacts) -> Iterator[AttentionSite]:
    """The formulas whose scale may be chosen: not those of a model that published weights are loaded into, which need
    the scale that they were trained with.
    """
    bases = (base for node in facts.nodes[ast.ClassDef] for base in node.bases)
    published = any(re.search(r"Pre[tT]rainedModel$", last_name(base)) for base in bases)
    return iter(()) if published or _PUBLISHED.search(facts.source) else formulas(facts)


_PUBLISHED = re.compile(
    r"\b(WeightsEnum|load_state_dict_from_url|hf_hub_download|load_pretrained\w*|from_pretrained|model_urls|pretrained_cfg)\b"
)


def _looks_like_transformer(site: AttentionSite) -> bool:
    sources = [source_of(_without_bias(term)) for term in (site.query, site.key, site.value)]
    if all(one.op == "apply" and one.value == "torch.nn.Linear" for one in sources[:2]):
        return text(sources[0]) != text(sources[1]) or sources[0] is sources[1]
    if all(one.op == "matmul" for one in sources):  # written as products with weight matrices
        weights = {id(one.get("other")) for one in sources}
        fused = sources[0] is sources[1] is sources[2] and source_of(site.query) is not site.query
        return fused or (len(weights) == 3 and text(sources[0].input) == text(sources[1].input))
    names = [label(one) for one in sources]
    return (
        all(one.op == "parameter" for one in sources)
        and bool(_QUERY_NAMES.match(names[0]))
        and bool(_KEY_NAMES.match(names[1]))
        and bool(re.match(r"^v|^value", names[2], re.I))
        and site.event.depth == 0
    )


def _without_bias(term: Term) -> Term:
    """A query or key without the learned vector that is added to all of them: the q of q + u."""
    learned = (one for one, other in sides(term) if other.op in ("attribute", "parameter", "call"))
    return next(learned, term) if term.op == "add" else term


def _may_be_scaled(site: AttentionSite, facts: ModuleFacts) -> bool:
    if any(step.op in ("mul", "div", "tanh", "clamp") for step in site.before):
        return True
    if any(step.op in ("add", "sub") and step.operand and _is_bias(step.operand) for step in site.before):
        return True
    if any(scale_steps(term) for term in (site.query, site.key)):
        return True
    names = {name for term in (site.query, site.key) for name in names_in(term, stop=_PROJECTIONS | {"matmul"})}
    return any(SCALE_NAME.search(name) for name in names) or _mentions_scale(site, facts)


def _is_read_both_ways(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether scores have a softmax over either axis: an affinity of two texts, which is published without a scale."""
    scores = site.softmax.input if site.softmax is not None else None
    taken = [one for one in facts.consumers.get(id(scores), []) if one.op == "softmax"]
    return len({number(one.get("dim")) for one in taken}) > 1


def _may_get_scaled_queries(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the query is an argument of a function whose callers may scale it: it is passed on as a value."""
    query = source_of(site.query)
    function = function_around(query.node, facts) if query.op == "parameter" else None
    return function is not None and is_used_as_value(function, facts)


def _is_bias(term: Term) -> bool:
    return any(_BIAS_NAMES.search(name) for name in names_in(term))


def _mentions_scale(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the function around has a name for a scale: what it does with it may not have been understood."""
    nodes = ast.walk(site.event.function) if site.event.function is not None else ()
    named = (one for one in nodes if isinstance(one, ast.Name | ast.Attribute | ast.arg))
    names = {one.arg if isinstance(one, ast.arg) else last_name(one) for one in named}
    return any(re.search(r"scal|temper|norm|sqrt", name, re.I) for name in names - {"LayerNorm"})


def _scales(site: AttentionSite) -> list[tuple[Term, DimensionPower]]:
    """The factors of a site before its softmax that are powers of a dimension."""
    return [
        (term, power) for where, term, power in _factors(site) if where != "weights" and power.dimension is not None
    ]


def _factors(site: AttentionSite) -> Iterator[tuple[str, Term, DimensionPower]]:
    """The scale factors of a site that are powers of a dimension: on the query, the key, the scores or the weights."""
    for where, term in (("query", site.query), ("key", site.key)):
        yield from ((where, *one) for one in _leading_factors(term))
    for where, steps in (("scores", site.before), ("weights", site.after)):
        for step in steps:
            yield from ((where, step.term, power) for power in _step_power(step))


def _step_power(step: Step) -> Iterator[DimensionPower]:
    if step.op in ("mul", "div") and step.operand is not None and not step.conditional:
        found = dimension_power(step.operand)
        if found is not None:
            yield DimensionPower(found.power if step.op == "mul" else -found.power, found.dimension)


def _leading_factors(term: Term) -> Iterator[tuple[Term, DimensionPower]]:
    """Factors on a query or key itself, through moves of its axes alone."""
    for _ in range(20):
        scaled, term = term, term.input
        if scaled.op in ("mul", "div"):
            for inner, factor in sides(scaled):
                found = dimension_power(factor)
                if found is not None and found.dimension is not None and found.power != 1.0:
                    yield scaled, DimensionPower(found.power if scaled.op == "mul" else -found.power, found.dimension)
                    term = inner
                    break
        elif scaled.op not in ("transpose", "reshape", "permute", "unsqueeze", "cast", "rearrange"):
            return


@rule("ATT102", Severity.ERROR)
def doubled_scale(facts: ModuleFacts) -> Iterator[Report]:
    """Dot products are scaled by 1/√d twice."""
    for site in facts.sites:
        if site.kind == "module":
            continue
        factors = _scales(site)
        power = sum(scale.power for _, scale in factors)
        if site.kind in ("sdpa", "flex"):
            if abs(power + 0.5) < 1e-6 and is_none(site.output.get("scale")):
                yield Report(
                    factors[0][0].node,
                    "the query or key is scaled by 1/√d, and the attention function scales by 1/√d again: "
                    "drop this factor, or pass scale=1.0",
                )
        elif (
            len(factors) > 1 and abs(power + 1.0) < 1e-6 and all(abs(scale.power + 0.5) < 1e-6 for _, scale in factors)
        ):
            yield Report(factors[-1][0].node, _SCALED_TWICE)
    for event in facts.operations("matmul", "einsum"):  # scores that go through a layer before the softmax
        scores = product(event.term)
        if scores is not None and any(_is_root_scaled(one) for one in (scores.left, scores.right)):
            for consumer in facts.consumers.get(id(event.term), []):
                if consumer.op in ("mul", "div") and consumer.input is event.term and _is_root_step(consumer):
                    yield Report(consumer.node, _SCALED_TWICE)


_SCALED_TWICE = "scores are scaled by 1/√d a second time: scale queries or scores, not both"


def _is_root_step(term: Term) -> bool:
    step = Step(term.op, term, term.get("other"))
    return any(one.dimension is not None and abs(one.power + 0.5) < 1e-6 for one in _step_power(step))


def _is_root_scaled(term: Term) -> bool:
    """Whether a query or key is scaled by 1/√d, and by nothing else."""
    return [round(one.power, 6) for _, one in _leading_factors(term)] == [-0.5]


@rule("ATT103", Severity.ERROR)
def wrong_power(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are scaled by another power of d than 1/√d: by 1/d, or multiplied by √d."""
    if re.search(r"\bmup\b|muP|μP", facts.source):
        return
    for site in _free_formulas(facts):
        if all(any(one.op == "normalize" for one in walk(term, stop=_PROJECTIONS)) for term in (site.query, site.key)):
            continue  # cosines, which are scaled up
        factors = _scales(site)
        power = sum(scale.power for _, scale in factors)
        if len(factors) == 1 and any(abs(power - wrong) < 1e-6 for wrong in (-1.0, 0.5, 1.0)):
            done = {-1.0: "divided by d", 0.5: "multiplied by √d", 1.0: "multiplied by d"}[round(power, 1)]
            yield Report(
                factors[0][0].node,
                f"scores are {done}; they need to be divided by √d",
                unless=_if_adapted(factors[0][0].node, facts),
            )


@rule("ATT104", Severity.ERROR)
def wrong_dimension(facts: ModuleFacts) -> Iterator[Report]:
    """Scores of several heads are scaled by the width of the model, or by a length, not by the dimension of a head."""
    for site in _free_formulas(facts):
        for where, term, power in _factors(site):
            if power.dimension is None or abs(power.power + 0.5) > 1e-6 or where == "weights":
                continue
            if _is_width_of_all_heads(power.dimension, site):
                yield Report(
                    term.node,
                    f"scores of each head are scaled by the width of all heads, {_spelled(power.dimension)}: "
                    "use the dimension of one head",
                    unless=_if_adapted(term.node, facts),
                )
            elif _is_length(power.dimension, site):
                yield Report(
                    term.node,
                    f"scores are scaled by a number of positions, {_spelled(power.dimension)}: "
                    "use the dimension of one head, the last axis of the query",
                )
        for step in site.before:
            counted = _rooted(step) if not step.conditional else None
            if counted is not None and _is_number_of_heads(counted, site):
                yield Report(
                    step.term.node,
                    f"scores are scaled by the number of heads, {_spelled(counted)}: use the dimension of one head",
                )


def _rooted(step: Step) -> Term | None:
    """The x of a division by √x, or of a product with 1/√x."""
    operand = step.operand
    if step.op not in ("mul", "div") or operand is None:
        return None
    if step.op == "mul" and operand.op == "div" and number(operand.get("input")) == 1:
        operand = operand.get("other") or operand
    if operand.op in ("sqrt", "rsqrt"):
        return operand.input
    return operand.input if operand.op == "pow" and abs(number(operand.get("other")) or 0) == 0.5 else None


def _is_number_of_heads(counted: Term, site: AttentionSite) -> bool:
    """Whether a term is the number of heads into which the query is split, before its axes were moved."""
    query = site.query
    query = through(query, "cast", "mul", "div", "carried", "dropout")
    moved = query.op in ("transpose", "permute") and query.input.op == "reshape"
    split = query.input if moved else query
    axes = sum(2 if one.op == "starred" else 1 for one in split.items)  # x.reshape(*leading, heads, dim)
    if split.op != "reshape" or axes < 4 or not moved:
        return False
    if not exchanges_middle(query):
        return False
    heads, dimension = split.items[-2:]
    if counted.op == "size":
        return counted.value in (1, -3) and counted.input is query
    return text(counted) == text(heads) and text(heads) != text(dimension)


def _spelled(term: Term) -> str:
    return f"`{ast.unparse(term.node)}`" if isinstance(term.node, ast.expr) else f"`{label(term)}`"


def _is_width_of_all_heads(dimension: Term, site: AttentionSite) -> bool:
    """Whether the query is split into heads of `dimension // heads`."""
    sizes = [
        size
        for one in walk(site.query, stop=_PROJECTIONS)
        if one.op == "reshape" and len(one.items) >= 4
        for size in one.items
    ]
    if any(
        size.op == "floordiv" and text(size.get("input")) == text(dimension) and number(size.get("other")) != 1
        for size in sizes
    ):
        return True
    source = source_of(site.query)
    module = source.get("module")
    if source.op != "apply" or source.value != "torch.nn.Linear" or module is None:
        return False
    inner, outer = module.get("in_features"), module.get("out_features")
    if inner is None or outer is None:
        return False
    if _is_split_by_rearrange(site.query):
        return any(text(one) == text(dimension) for one in (inner, outer)) and not _is_multiple(outer, inner)
    narrower = text(inner) != text(outer) and not _is_multiple(outer, inner) and not sizes
    return narrower and dimension.op == "size" and dimension.input is source.input and dimension.value in (2, -1)


def _is_split_by_rearrange(query: Term) -> bool:
    """Whether einops splits the last axis of a query into heads: "b n (h d) -> b h n d"."""
    patterns = [one.get("pattern") for one in walk(query, stop=_PROJECTIONS) if one.op == "rearrange"]
    return any(
        pattern is not None
        and isinstance(pattern.value, str)
        and re.search(r"\((h|heads|num_heads) \w+\) *->.*\b(h|heads|num_heads)\b", pattern.value)
        for pattern in patterns
    )


def _is_multiple(outer: Term, inner: Term) -> bool:
    """Whether a projection has the width of its input once for each head, not for queries, keys and values alone."""
    if outer.op != "mul":
        return False
    factors = [outer.get("input"), outer.get("other")]
    return any(text(one) == text(inner) for one in factors) and not any(number(one) in (2, 3) for one in factors)


def _is_length(dimension: Term, site: AttentionSite) -> bool:
    if dimension.op != "size" or dimension.value is None or site.scores is None:
        return False
    if site.scores.term.op != "matmul":
        return False
    sized = dimension.input
    if sized is site.scores.term:
        return dimension.value in (-1, -2)
    key = site.key.input if site.key.op == "transpose" else site.key
    if sized is site.query or (sized is key and site.key.op == "transpose"):
        return dimension.value == -2
    return sized is site.key and site.key.op == "transpose" and dimension.value == -1


@rule("ATT105", Severity.ERROR)
def scale_after_softmax(facts: ModuleFacts) -> Iterator[Report]:
    """The scale 1/√d is applied to the weights, after the softmax."""
    for site in formulas(facts):
        for where, term, power in _factors(site):
            if where == "weights" and power.dimension is not None and abs(abs(power.power) - 0.5) < 1e-6:
                yield Report(term.node, "the weights are scaled by √d after the softmax: scale the scores before it")


@rule("ATT106", Severity.ERROR)
def zero_scale(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are multiplied by a scale of 0, so that all weights are equal."""
    for event in facts.operations("sdpa", "flex"):
        scale = event.term.get("scale")
        if scale is not None and number(scale) == 0:
            yield Report(event.term.node, "scale=0 makes all weights equal: leave it out for 1/√d")
