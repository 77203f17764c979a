"""Rules about positions and caches: rotary positions, missing positions, registration of attention."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, projection_name, source_of
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import Event, ModuleFacts
from ..python_syntax import Function, below, bound_names, code_of, last_name, names_below, parameters, target_names
from ..term import Term, is_none, number, sides, walk
from .base import Report, rule

_ROTARY = re.compile(r"rotary|(^|_)rope(_|$)|apply_rot|rotate_queries", re.I)
_VALUES = re.compile(r"^(v|value|values|xv|value_states|v_states|value_layer|vs)$", re.I)
_KEYS = re.compile(r"^(k|key|keys|xk|key_states|k_states|key_layer|ks)$", re.I)
_CACHED = re.compile(r"past|cache|prev", re.I)
_POSITIONS = re.compile(
    r"posit|rope\b|rotary|alibi|sinus|pos_|_pos\b|\bpos\b|pos_?emb|\bpe\b|relative|freqs|timing|wpe"
    r"|time_?(step|emb|enc|pos|id)",
    re.I,
)


@rule("ATT501", Severity.ERROR)
def rotary_values(facts: ModuleFacts) -> Iterator[Report]:
    """Rotary positions are applied to the values."""
    message = "rotary positions are applied to the values: rotate queries and keys alone"
    rotates = bool(facts.sites) and re.search(r"rotary|rope\b|\bcos\b|angle|freq", facts.source, re.I) is not None
    for node in facts.nodes[ast.Assign]:
        if isinstance(node.value, ast.GeneratorExp | ast.ListComp) and isinstance(node.value.elt, ast.Call):
            names = list(bound_names(node.targets[0]))
            iterated = {*bound_names(node.value.generators[0].iter), *(names[-1:] if len(names) == 3 else ())}
            if _is_rotary(node.value.elt) and any(map(_VALUES.match, iterated)):
                yield Report(node.value, message)
        for names, call in _assigned_calls(node):
            above = facts.parents[node]
            optional = isinstance(above, ast.If) and "value" in ast.unparse(above.test)  # an option of RoFormer
            rotary = _is_rotary(call) or (rotates and last_name(call.func) == "rotate")
            rotated = rotary and any(map(_VALUES.match, _passed(call) & {*names}))
            known = optional or not rotated or _turns_back(call, facts)
            if not known and not _returns_values_as_they_were(call, facts):
                yield Report(call, message, unless=_why_rotated(call, facts))


def _passed(call: ast.Call) -> set[str]:
    """The names that a call passes by their positions."""
    return {name for argument in call.args for name in bound_names(argument)}


def _why_rotated(call: ast.Call, facts: ModuleFacts) -> str:
    """A reason why what is rotated may be no values, or may be: no keys are around, or they have other tables."""
    if _has_other_table_than_queries(call, facts):
        return "keys and values have positions in space"
    function = facts.function_around(call)
    names = names_below(function or call) | {one.arg for one in parameters(function)}
    return "" if any(_KEYS.match(name) for name in names) else "these are no values, but any vectors"


def _has_other_table_than_queries(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether queries are rotated by another table, so that keys and values may have positions in space."""

    def table(rotation: ast.Call) -> set[str]:
        return {name for one in rotation.args[1:] for name in bound_names(one)}

    rotations = (one for one in facts.beside(call, ast.Call) if _is_rotary(one) and one.args)
    turned = [table(one) for one in rotations if re.match("q", ast.unparse(one.args[0]), re.I)]
    return any(one and table(call) and one.isdisjoint(table(call)) for one in turned)


def _turns_back(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether the function around rotates its output by the opposite angles, which makes of them distances."""
    rotations = (ast.unparse(one) for one in facts.beside(call, ast.Call) if _is_rotary(one))
    return any(re.search(r"revers|invers|undo|unrot|back|conj", one) for one in rotations)


def _returns_values_as_they_were(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether a function of this file gets queries, keys and values, and turns something else than the values."""
    known = (one for one in facts.nodes[ast.FunctionDef] if one.name == last_name(call.func))
    assigned = (node for one in known for node in below(one, ast.Assign) if _TURNED.search(ast.unparse(node.value)))
    turned = {name for node in assigned for name in target_names(node)}
    return len(call.args) > 2 and bool(turned) and not any(map(_VALUES.match, turned))


_TURNED = re.compile(r"rotary|rope|rotate|cos", re.I)


def _assigned_calls(node: ast.Assign) -> Iterator[tuple[list[str], ast.Call]]:
    """The calls whose results an assignment binds, each with the names: of `q, k = f(q), g(k)` both by themselves."""
    match node:
        case ast.Assign(value=ast.Call() as call):
            yield [name for target in node.targets for name in bound_names(target)], call
        case ast.Assign(targets=[ast.Tuple(elts=targets), *_], value=ast.Tuple(elts=values)):
            for target, value in zip(targets, values, strict=False):
                if isinstance(value, ast.Call):
                    yield list(bound_names(target)), value


def _is_rotary(call: ast.Call) -> bool:
    return bool(_ROTARY.search(last_name(call.func)))


@rule("ATT502", Severity.WARNING)
def rotary_after_cache(facts: ModuleFacts) -> Iterator[Report]:
    """Rotary positions are applied to keys after those of the cache are joined to them."""
    if not _ROTARY.search(facts.source) or not _CACHED.search(facts.source):
        return
    for function in [*facts.nodes[ast.FunctionDef], *facts.nodes[ast.AsyncFunctionDef]]:
        joined: dict[str, ast.Assign] = {}
        for node in sorted(below(function, ast.Assign), key=lambda one: one.lineno):
            for names, call in _assigned_calls(node):
                if call is node.value and _is_rotary(call) and not _decays(call):
                    again = _passed(call) & {*names} & joined.keys()
                    if any(not _excludes(joined[name], node, facts) for name in again):
                        kept = _is_kept_unrotated(function, node)
                        message = _ROTATED_EACH_STEP if kept else _ROTATED_AGAIN
                        yield Report(call, message, unless="positions of cached keys move" if kept else "")
                elif _joins_cache(call):
                    joined.update({name: node for name in names if _KEYS.match(name)})
        attending = (one for one in below(function, ast.Call) if last_name(one.func) == "scaled_dot_product_attention")
        for one in (one for call in attending for one in call.args if isinstance(one, ast.Call) and _is_rotary(one)):
            if _passed(one) & joined.keys():
                yield Report(one, _ROTATED_AGAIN)


_ROTATED_AGAIN = "keys of the cache are rotated again with the new ones: rotate, then append"
_ROTATED_EACH_STEP = "each step rotates all keys of the cache: rotate the new ones, then append"


def _is_kept_unrotated(function: Function, rotation: ast.Assign) -> bool:
    """Whether a function stores keys before any of its statements rotates keys, so that those of the cache are not."""
    stores, rotations = [], [rotation.lineno]
    for node in below(function, ast.Assign):
        if any(map(_KEYS.match, names_below(node.value))):
            if re.search(r"past|cache|prev|present|state", " ".join(map(ast.unparse, node.targets))):
                stores.append(node.lineno)
            if any(map(_is_rotary, below(node.value, ast.Call))):
                rotations.append(node.lineno)
    return any(line < min(rotations) for line in stores)


def _decays(call: ast.Call) -> bool:
    """Whether keys are also scaled by their distance from the last position, as xPos does: that of old ones changes."""
    return any(one.arg is not None and "scale" in one.arg for one in call.keywords)


def _excludes(one: ast.stmt, other: ast.stmt, facts: ModuleFacts) -> bool:
    """Whether two statements are in different branches of one condition."""
    above = {facts.parents.get(node): node for node in facts.around(one)}
    pairs = ((facts.parents.get(node), node) for node in facts.around(other))
    return any(
        isinstance(test, ast.If) and test in above and (above[test] in test.body) != (node in test.body)
        for test, node in pairs
    )


def _joins_cache(call: ast.Call) -> bool:
    is_join = last_name(call.func) in ("cat", "concat", "concatenate")
    return is_join and bool(_CACHED.search(ast.unparse(call)))


@rule("ATT503", Severity.ERROR)
def positions_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """Positions are counted in half precision."""
    for event in facts.operations("arange"):
        dtype = _default(event.term["dtype"], facts)
        last = number(next(iter(event.term.items[:2][::-1]), None))
        exact = _EXACT_UP_TO.get(dtype, math.inf)
        if exact < math.inf and (last is None or last > exact) and counts_positions(event, facts):
            yield Report(event.node, f"positions in {dtype.removeprefix('torch.')} are not exact: count in float32")


_EXACT_UP_TO = {"torch.bfloat16": 256, "torch.float16": 2048, "torch.half": 2048}
"""The whole numbers that these dtypes hold, each up to this one."""
_POSITION_NAMES = re.compile(
    r"pos|^t$|^seq|freq|angle|theta|alibi|slope|dist|rotary|(^|_)rope|sinus|idx|indices|timing", re.I
)


def counts_positions(event: Event, facts: ModuleFacts) -> bool:
    """Whether what is counted are positions: by its name, that of the function or class, or its products."""
    names = [one.name for one in (event.function, event.class_) if one is not None]
    assigned = facts.statement_around(event.node)
    if isinstance(assigned, ast.Assign):
        names += [ast.unparse(one).removeprefix("self.") for one in assigned.targets]
    outer = any(str(one.value).endswith(".outer") for one in facts.uses(event.term, "call"))
    return any(map(_POSITION_NAMES.search, names)) or outer or bool(facts.uses(event.term, "einsum", "matmul"))


def _default(term: Term, facts: ModuleFacts) -> str:
    """The name that a value is, such as "torch.float16", or that the default of the parameter is; or ""."""
    if term.op == "parameter":
        return code_of(facts.default_of(term))
    return str(term.value) if term.op == "name" else ""


@rule("ATT504", Severity.WARNING)
def missing_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Embedded tokens go into a Transformer without any information of their positions."""
    if _POSITIONS.search(re.sub(r"#[^\n]*", "", facts.source)):
        return
    message = "nothing tells this Transformer the positions of its tokens: add positions to them"
    for event in facts.applied("torch.nn.TransformerEncoder", "torch.nn.Transformer"):
        source = event.term["src"]
        if _embeds_tokens_alone(source) or _reads_last_of_projected(event.term, source, facts):
            yield Report(event.node, message)
    calls = {}
    for site in (one for one in facts.sites if one.event.call is not None):
        alike = projection_name(site.query) == projection_name(site.key) == "torch.nn.Linear"
        embedded = alike and all(_embeds_tokens_alone(source_of(one)) for one in (site.query, site.key))
        if embedded and not _has_bias(site):
            calls.setdefault(site.event.call, message)
    yield from map(Report, calls, calls.values())


def _has_bias(site: AttentionSite) -> bool:
    """Whether anything but a mask of a known shape is added to the scores: it may be a bias by distance."""
    given = (site.output[name] for name in ("attn_mask", "score_mod", "block_mask", "**"))
    added = (step.operand for step in site.before if step.op in ("add", "sub") and number(step.operand) is None)
    return any(mask_values(one) is None for one in (*added, *given) if not is_none(one))


def _embeds_tokens_alone(source: Term) -> bool:
    """Whether embedded tokens are in what a layer reads, and no counted positions, recurrence or convolution."""
    found = list(walk(source))
    layers = [str(one.value) for one in found if one.op == "apply"]
    if any(one.op == "arange" for one in found) or any(re.search(r"LSTM|GRU|RNN|Conv", name) for name in layers):
        return False
    if any(one.value in ("torch.nn.Parameter", "weight") for one in found if one.op in ("call", "attribute")):
        return False  # a table that is added, by whatever name
    return layers.count("torch.nn.Embedding") == 1


def _reads_last_of_projected(output: Term, source: Term, facts: ModuleFacts) -> bool:
    """Whether features go through one linear layer into an encoder whose last position is the result.

    Without a mask and without positions every position gets the same function of the set: the last one means nothing.
    """
    projected = source.applies("torch.nn.Linear") and source.input.op == "parameter"
    read = (one.items for one in facts.uses(output, "item") if len(one.items) == 2)
    last = any(one[0].op == "slice" and number(one[1]) == -1 for one in read)
    return projected and output.lacks("mask", "is_causal") and last


@rule("ATT241", Severity.ERROR)
def attention_without_mask_function(facts: ModuleFacts) -> Iterator[Report]:
    """An attention function is registered with transformers, and no mask function under its name."""
    registered, masks = [], set()
    for call in facts.nodes[ast.Call]:
        if call.args and last_name(call.func) == "register":
            found = _REGISTRIES.search(ast.unparse(call.func))
            if found is not None and "mask" in found[2].lower():
                masks.add(ast.unparse(call.args[0]))
            elif found is not None:
                registered.append(call)
    stored = (one for one in facts.nodes[ast.Subscript] if last_name(one.value) == "ALL_MASK_ATTENTION_FUNCTIONS")
    masks |= {ast.unparse(one.slice) for one in stored}
    for call in registered:
        name, written = ast.unparse(call.args[0]), " ".join(map(ast.unparse, call.args))
        if _OF_PICTURES.search(written) or getattr(call.args[0], "value", None) in _HAS_MASKS:
            continue
        if name not in masks and len(call.args) >= 2 and _may_read_mask(call.args[1], facts):
            yield Report(
                call,
                f"the attention function {name} is registered without a mask function of that name: its "
                "mask is None; register one with AttentionMaskInterface",
            )


_REGISTRIES = re.compile(
    r"(^|\.)(Attention(?:Mask)?Interface|ALL_ATTENTION_FUNCTIONS|ALL_MASK_ATTENTION_FUNCTIONS)(\(\))?\.register$"
)


_HAS_MASKS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""Names under which transformers has mask functions of its own."""
_OF_PICTURES = re.compile(r"vision|visual|image|vit\b", re.I)


def _may_read_mask(function: ast.expr, facts: ModuleFacts) -> bool:
    """Whether an attention function of this file uses its mask; an engine may have masks of its own."""
    found = facts.functions.get(last_name(function))
    if found is None or re.search(
        r"causal masking internally|masks? (is|are) (ignored|unused)", ast.get_docstring(found) or ""
    ):
        return False
    masks = {one.arg for one in parameters(found) if "mask" in one.arg}
    return not masks or bool(masks & names_below(found))


@rule("ATT516", Severity.ERROR)
def table_without_offset(facts: ModuleFacts) -> Iterator[Report]:
    """A table of positions is kept under a key that leaves out a number which it depends on."""
    for test in facts.nodes[ast.If]:
        function = facts.function_around(test)
        match test.test:
            case ast.Compare(left=key, ops=[ast.NotIn(), *_], comparators=[kept, *_]) if function is not None:
                assigned = below(function, ast.Assign)
                values = {one.targets[0].id: one for one in assigned if isinstance(one.targets[0], ast.Name)}
                known = {one.arg for one in parameters(function)} & _POSITION_NUMBERS - _read(key, values)
                store = f"{ast.unparse(kept)}["
                for one in (one for body in test.body for one in below(body, ast.Assign)):
                    missing = known & _read(one.value, values)
                    if missing and any(ast.unparse(target).startswith(store) for target in one.targets):
                        name = min(missing)
                        message = f"this is kept without `{name}` in its key: another {name} gets the same numbers"
                        yield Report(one, message)


_POSITION_NUMBERS = frozenset({"offset", "start", "start_pos", "position", "base", "theta", "scale", "factor", "past"})


def _read(node: ast.AST, values: dict[str, ast.Assign], depth: int = 4) -> set[str]:
    """The names that an expression reads, and those that they were computed from."""
    names = names_below(node)
    for name in list(names):
        if name in values and depth:
            names |= _read(values[name].value, {k: v for k, v in values.items() if k != name}, depth - 1)
    return names


@rule("ATT517", Severity.ERROR)
def one_row_of_the_table(facts: ModuleFacts) -> Iterator[Report]:
    """One row of the table of positions is added to all of them: it is indexed by the length, and not cut to it."""
    for event in facts.operations("add"):
        for added, row in sides(event.term):
            sizes = [one for one in row.items if one.op == "size" and one.input is added]
            if row.op == "item" and any(one.value in (0, 1, -2) for one in sizes):
                yield Report(row.node, "this is one row, added to every position: cut the table to the length, `:n`")
