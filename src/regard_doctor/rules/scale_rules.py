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
    WrittenFormula,
    dimension_power,
    names_in,
    product,
    scale_steps,
    source_of,
)
from ..finding import Severity
from ..module_facts import ModuleFacts
from ..python_syntax import Function, below, last_name
from ..term import ABSENT, Term, exchanges_middle, is_none, label, number, same, sides, text, through, walk
from .base import Report, formulas, rule

_QUERY_NAMES = re.compile(
    r"^(q|query|queries|xq|wq|q_?proj|to_q|query_layer|q_?states?|query_states|w_?q(uery)?)$", re.I
)
_KEY_NAMES = re.compile(r"^(k|key|keys|xk|wk|k_?proj|to_k|key_layer|k_?states?|key_states|w_?k(ey)?)$", re.I)
_VALUE_NAMES = re.compile(r"v", re.I)
_PROJECTIONS = frozenset({"apply"})
_BIAS_NAMES = re.compile(r"pos(ition)?_bias|rel(_|ative|$)|bias_table|alibi|slope", re.I)


@rule("ATT101", Severity.ERROR)
def missing_scale(facts: ModuleFacts) -> Iterator[Report]:
    """Dot products of queries and keys are not divided by √d."""
    for site in _free_formulas(facts):
        scaled = _may_be_scaled(site) or _may_get_scaled_queries(site, facts) or _is_read_both_ways(site, facts)
        if not scaled and _looks_like_transformer(site):
            luong = any(step.op in ("squeeze", "element", "item") for step in site.before) or _is_named_dot(site, facts)
            yield Report(
                site.scores.term.node,
                "scores of queries and keys are not divided by the square root of their dimension: "
                "multiply by `dim ** -0.5` before the softmax",
                unless="these are the plain dot products of Luong's attention"
                if luong
                else _if_adapted(site.node, facts),
            )


def _is_named_dot(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the function around is named as attention by dot products, and not by scaled ones."""
    function = facts.function_around(site.node)
    return function is not None and re.match(r"_*dot_?(product_?)?att", function.name, re.I) is not None


_ADAPTED = re.compile(
    r"\b(adapted|adopted|borrowed|copied|modified|ported|taken|converted) from\b|official (code|impl)", re.I
)


def _if_adapted(node: ast.AST, facts: ModuleFacts) -> str:
    """The doubt about a scale where the text around says that the code is that of a published model."""
    documented = (one for one in facts.around(node) if isinstance(one, ast.Module | ast.ClassDef | Function))
    adapted = any(_ADAPTED.search(ast.get_docstring(one) or "") for one in documented)
    return "the published model that this is adapted from has that scale" if adapted else ""


def _free_formulas(facts: ModuleFacts) -> Iterator[WrittenFormula]:
    """The formulas whose scale may be chosen: published weights need the scale that they were trained with."""
    bases = (base for node in facts.nodes[ast.ClassDef] for base in node.bases)
    published = any(re.search(r"Pre[tT]rainedModel$", last_name(base)) for base in bases)
    return iter(()) if published or _PUBLISHED.search(facts.source) else formulas(facts)


_PUBLISHED = re.compile(
    r"\b(WeightsEnum|load_state_dict_from_url|hf_hub_download|load_pretrained\w*|from_pretrained|model_urls|pretrained_cfg)\b"
)


def _looks_like_transformer(site: AttentionSite) -> bool:
    sources = [source_of(_without_bias(term)) for term in (site.query, site.key, site.value)]
    if all(one.applies("torch.nn.Linear") for one in sources[:2]):
        return text(sources[0]) != text(sources[1]) or sources[0] is sources[1]
    if all(one.op == "matmul" for one in sources):  # written as products with weight matrices
        weights = {id(one.get("other")) for one in sources}
        fused = sources[0] is sources[1] is sources[2] and source_of(site.query) is not site.query
        return fused or (len(weights) == 3 and text(sources[0].input) == text(sources[1].input))
    named = zip((_QUERY_NAMES, _KEY_NAMES, _VALUE_NAMES), map(label, sources), strict=True)
    passed = site.event.depth == 0 and all(one.op == "parameter" for one in sources)
    return passed and all(pattern.match(name) for pattern, name in named)


def _without_bias(term: Term) -> Term:
    """A query or key without the learned vector that is added to all of them: the q of q + u."""
    learned = (one for one, other in sides(term) if other.op in ("attribute", "parameter", "call"))
    return next(learned, term) if term.op == "add" else term


def _may_be_scaled(site: AttentionSite) -> bool:
    for step in site.before:
        if step.op in ("mul", "div", "tanh", "clamp") or (step.op in ("add", "sub") and _is_bias(step.operand)):
            return True
    if any(scale_steps(term) for term in (site.query, site.key)):
        return True
    names = {name for term in (site.query, site.key) for name in names_in(term, stop=_PROJECTIONS | {"matmul"})}
    return any(SCALE_NAME.search(name) for name in names) or _mentions_scale(site)


def _is_read_both_ways(site: WrittenFormula, facts: ModuleFacts) -> bool:
    """Whether scores have a softmax over either axis: an affinity of two texts, which is published without a scale."""
    return len({number(one["dim"]) for one in facts.uses(site.softmax.input, "softmax")}) > 1


def _may_get_scaled_queries(site: AttentionSite, facts: ModuleFacts) -> bool:
    """Whether the query is an argument of a function whose callers may scale it: it is passed on as a value."""
    query = source_of(site.query)
    function = facts.function_around(query.node) if query.op == "parameter" else None
    return function is not None and facts.is_used_as_value(function)


def _is_bias(term: Term | None) -> bool:
    return any(_BIAS_NAMES.search(name) for name in names_in(term or ABSENT))


def _mentions_scale(site: AttentionSite) -> bool:
    """Whether the function around has a name for a scale: what it does with it may not have been understood."""
    named = below(site.event.function, ast.Name, ast.Attribute, ast.arg)
    names = {one.arg if isinstance(one, ast.arg) else last_name(one) for one in named}
    return any(re.search(r"scal|temper|norm|sqrt", name, re.I) for name in names - {"LayerNorm"})


def _scales(site: AttentionSite) -> list[tuple[Term, DimensionPower]]:
    """The factors of a site before its softmax that are powers of a dimension."""
    return [(term, power) for where, term, power in _factors(site) if where != "weights" and power.dimension]


def _factors(site: AttentionSite) -> Iterator[tuple[str, Term, DimensionPower]]:
    """The scale factors of a site that are powers of a dimension: on the query, the key, the scores or the weights."""
    for where, term in (("query", site.query), ("key", site.key)):
        yield from ((where, *one) for one in _leading_factors(term))
    for where, steps in (("scores", site.before), ("weights", site.after)):
        for step in steps:
            yield from ((where, step.term, power) for power in _step_power(step))


def _step_power(step: Step) -> Iterator[DimensionPower]:
    found = dimension_power(step.operand or ABSENT) if step.op in ("mul", "div") and not step.conditional else None
    if found is not None:
        yield found.by(step.op)


def _leading_factors(term: Term) -> Iterator[tuple[Term, DimensionPower]]:
    """Factors on a query or key itself, through moves of its axes alone."""
    for _ in range(20):
        scaled, term = term, term.input
        if scaled.op in ("mul", "div"):
            for inner, factor in sides(scaled):
                found = dimension_power(factor)
                if found is not None and found.dimension is not None and found.power != 1.0:
                    yield scaled, found.by(scaled.op)
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
        powers = [round(scale.power, 6) for _, scale in factors]
        if site.kind in ("sdpa", "flex") and round(sum(powers), 6) == -0.5 and is_none(site.output["scale"]):
            yield Report(
                factors[0][0].node,
                "the query or key is scaled by 1/√d, and the attention function scales by 1/√d again: "
                "drop this factor, or pass scale=1.0",
            )
        if site.kind == "formula" and powers == [-0.5, -0.5]:
            yield Report(factors[-1][0].node, _SCALED_TWICE)
    for event in facts.operations("matmul", "einsum"):  # scores that go through a layer before the softmax
        scores = product(event.term)
        if scores is not None and any(_is_root_scaled(one) for one in (scores.left, scores.right)):
            for consumer in facts.uses(event.term, "mul", "div"):
                if consumer.input is event.term and _is_root_step(consumer):
                    yield Report(consumer.node, _SCALED_TWICE)


_SCALED_TWICE = "scores are scaled by 1/√d a second time: scale queries or scores, not both"


def _is_root_step(term: Term) -> bool:
    found = _step_power(Step(term.op, term, term["other"]))
    return any(one.dimension is not None and round(one.power, 6) == -0.5 for one in found)


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
        node, power = (factors[0][0].node, round(factors[0][1].power, 6)) if len(factors) == 1 else (None, 0)
        done = {-1.0: "divided by d", 0.5: "multiplied by √d", 1.0: "multiplied by d"}.get(power)
        if node is not None and done is not None:
            message = f"scores are {done}; they need to be divided by √d"
            yield Report(node, message, unless=_if_adapted(node, facts))


@rule("ATT104", Severity.ERROR)
def wrong_dimension(facts: ModuleFacts) -> Iterator[Report]:
    """Scores of several heads are scaled by the width of the model, or by a length, not by the dimension of a head."""
    for site in _free_formulas(facts):
        for where, term, power in _factors(site):
            if power.dimension is None or round(power.power, 6) != -0.5 or where == "weights":
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
    operand = step.operand if step.op in ("mul", "div") and step.operand is not None else ABSENT
    if step.op == "mul" and operand.op == "div" and number(operand["input"]) == 1:
        operand = operand["other"]
    root = operand.op == "pow" and abs(number(operand["other"]) or 0) == 0.5
    return operand.input if root or operand.op in ("sqrt", "rsqrt") else None


def _is_number_of_heads(counted: Term, site: AttentionSite) -> bool:
    """Whether a term is the number of heads into which the query is split, before its axes were moved."""
    query = through(site.query, "cast", "mul", "div", "carried", "dropout")
    split = query.input
    axes = sum(2 if one.op == "starred" else 1 for one in split.items)  # x.reshape(*leading, heads, dim)
    if not exchanges_middle(query) or split.op != "reshape" or axes < 4:
        return False
    heads, dimension = split.items[-2:]
    if counted.op == "size":
        return counted.value in (1, -3) and counted.input is query
    return text(counted) == text(heads) and text(heads) != text(dimension)


def _spelled(term: Term) -> str:
    return f"`{ast.unparse(term.node)}`" if isinstance(term.node, ast.expr) else f"`{label(term)}`"


def _is_width_of_all_heads(dimension: Term, site: AttentionSite) -> bool:
    """Whether the query is split into heads of `dimension // heads`."""
    split = (one for one in walk(site.query, stop=_PROJECTIONS) if one.op == "reshape" and len(one.items) >= 4)
    sizes = [size for one in split for size in one.items]
    divided = (size for size in sizes if size.op == "floordiv" and number(size["other"]) != 1)
    if any(same(size["input"], dimension) for size in divided):
        return True
    source = source_of(site.query)
    inner, outer = source["module"]["in_features"], source["module"]["out_features"]
    if source.op != "apply" or source.value != "torch.nn.Linear" or ABSENT in (inner, outer):
        return False
    if _is_split_by_rearrange(site.query):
        return any(text(one) == text(dimension) for one in (inner, outer)) and not _is_multiple(outer, inner)
    narrower = text(inner) != text(outer) and not _is_multiple(outer, inner) and not sizes
    return narrower and dimension.op == "size" and dimension.input is source.input and dimension.value in (2, -1)


def _is_split_by_rearrange(query: Term) -> bool:
    """Whether einops splits the last axis of a query into heads: "b n (h d) -> b h n d"."""
    patterns = (str(one["pattern"].value) for one in walk(query, stop=_PROJECTIONS) if one.op == "rearrange")
    return any(re.search(r"\((h|heads|num_heads) \w+\) *->.*\b(h|heads|num_heads)\b", one) for one in patterns)


def _is_multiple(outer: Term, inner: Term) -> bool:
    """Whether a projection has the width of its input once for each head, not for queries, keys and values alone."""
    factors = [outer["input"], outer["other"]] if outer.op == "mul" else []
    return any(same(one, inner) for one in factors) and not any(number(one) in (2, 3) for one in factors)


def _is_length(dimension: Term, site: WrittenFormula) -> bool:
    if dimension.op != "size" or site.scores.term.op != "matmul":
        return False
    transposed = site.key.op == "transpose"
    lengths = {id(site.scores.term): (-1, -2), id(site.query): (-2,)}
    lengths |= {id(site.key.input): (-2,), id(site.key): (-1,)} if transposed else {}
    return dimension.value in lengths.get(id(dimension.input), ())


@rule("ATT105", Severity.ERROR)
def scale_after_softmax(facts: ModuleFacts) -> Iterator[Report]:
    """The scale 1/√d is applied to the weights, after the softmax."""
    for site in formulas(facts):
        for where, term, power in _factors(site):
            if where == "weights" and power.dimension is not None and round(abs(power.power), 6) == 0.5:
                yield Report(term.node, "the weights are scaled by √d after the softmax: scale the scores before it")


@rule("ATT106", Severity.ERROR)
def zero_scale(facts: ModuleFacts) -> Iterator[Report]:
    """Scores are multiplied by a scale of 0, so that all weights are equal."""
    for event in facts.operations("sdpa", "flex"):
        if number(event.term["scale"]) == 0:
            yield Report(event.node, "scale=0 makes all weights equal: leave it out for 1/√d")
