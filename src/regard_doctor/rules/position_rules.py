"""Rules about positions and caches: rotary positions, missing positions, registration of attention."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..attention_sites import AttentionSite, projection_name, source_of
from ..finding import Severity
from ..mask_values import mask_values
from ..module_facts import Event, Function, ModuleFacts
from ..term import Term, is_none, number, sides, walk
from .base import (
    Report,
    around,
    bound_names,
    default_of,
    function_around,
    last_name,
    names_below,
    parameters,
    rule,
    statement_around,
    target_names,
)

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
    is_about_rotary = (
        bool(facts.sites) and re.search(r"rotary|rope\b|\bcos\b|angle|freq", facts.source, re.I) is not None
    )
    for node in facts.nodes[ast.Assign]:
        if isinstance(node.value, ast.GeneratorExp | ast.ListComp) and isinstance(node.value.elt, ast.Call):
            iterated = set(bound_names(node.value.generators[0].iter))
            last = [name for target in node.targets for name in bound_names(target)][-1:]
            iterated |= set(last) if len(list(bound_names(node.targets[0]))) == 3 else set()
            if _is_rotary(node.value.elt) and any(_VALUES.match(name) for name in iterated):
                yield Report(node.value, "rotary positions are applied to the values: rotate queries and keys alone")
        for names, call in _assigned_calls(node):
            passed = {name for argument in call.args for name in bound_names(argument)}
            above = facts.parents[node]
            optional = isinstance(above, ast.If) and "value" in ast.unparse(above.test)  # an option of RoFormer
            rotary = _is_rotary(call) or (is_about_rotary and last_name(call.func) == "rotate")
            rotated = any(_VALUES.match(name) and name in passed for name in names)
            if not rotary or optional or not rotated or _turns_back(call, facts):
                continue
            if not _returns_values_as_they_were(call, facts):
                yield Report(
                    call,
                    "rotary positions are applied to the values: rotate queries and keys alone",
                    unless=_why_rotated(call, facts),
                )


def _why_rotated(call: ast.Call, facts: ModuleFacts) -> str:
    """A reason why what is rotated may be no values, or may be: no keys are around, or they have other tables."""
    if _has_other_table_than_queries(call, facts):
        return "keys and values have positions in space"
    function = function_around(call, facts)
    names = names_below(function or call) | {one.arg for one in parameters(function)}
    return "" if any(_KEYS.match(name) for name in names) else "these are no values, but any vectors"


def _has_other_table_than_queries(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether queries are rotated by another table, so that keys and values may have positions in space."""

    def table(rotation: ast.Call) -> set[str]:
        return {name for one in rotation.args[1:] for name in bound_names(one)}

    calls = [one for one in ast.walk(function_around(call, facts) or call) if isinstance(one, ast.Call)]
    turned = [one for one in calls if _is_rotary(one) and one.args and re.match("q", ast.unparse(one.args[0]), re.I)]
    return any(table(one) and table(call) and table(one).isdisjoint(table(call)) for one in turned)


def _turns_back(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether the function around rotates its output by the opposite angles, which makes of them distances."""
    calls = (node for node in ast.walk(function_around(call, facts) or call) if isinstance(node, ast.Call))
    return any(_is_rotary(one) and re.search(r"revers|invers|undo|unrot|back|conj", ast.unparse(one)) for one in calls)


def _returns_values_as_they_were(call: ast.Call, facts: ModuleFacts) -> bool:
    """Whether a function of this file gets queries, keys and values, and turns something else than the values."""
    known = [one for one in facts.nodes[ast.FunctionDef] if one.name == last_name(call.func)]
    turned = [
        one
        for function in known
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and re.search(r"rotary|rope|rotate|cos", ast.unparse(node.value), re.I)
        for one in target_names(node)
    ]
    return len(call.args) > 2 and bool(turned) and not any(_VALUES.match(name) for name in turned)


def _assigned_calls(node: ast.Assign) -> Iterator[tuple[list[str], ast.Call]]:
    """The calls whose results an assignment binds, each with the names: of `q, k = f(q), g(k)` both by themselves."""
    if isinstance(node.value, ast.Call):
        yield [name for target in node.targets for name in bound_names(target)], node.value
    target = node.targets[0]
    if isinstance(node.value, ast.Tuple) and isinstance(target, ast.Tuple):
        for name, value in zip(target.elts, node.value.elts, strict=False):
            if isinstance(value, ast.Call):
                yield list(bound_names(name)), value


def _is_rotary(call: ast.Call) -> bool:
    return bool(_ROTARY.search(last_name(call.func)))


@rule("ATT502", Severity.WARNING)
def rotary_after_cache(facts: ModuleFacts) -> Iterator[Report]:
    """Rotary positions are applied to keys after those of the cache are joined to them."""
    if not _ROTARY.search(facts.source) or not _CACHED.search(facts.source):
        return
    for function in [*facts.nodes[ast.FunctionDef], *facts.nodes[ast.AsyncFunctionDef]]:
        joined: dict[str, ast.Assign] = {}
        for node in sorted(_assignments(function), key=lambda one: one.lineno):
            names = {name for target in node.targets for name in bound_names(target)}
            call = node.value
            if isinstance(call, ast.Call) and _is_rotary(call) and not _decays(call):
                passed = {name for argument in call.args for name in bound_names(argument)}
                if any(
                    name in passed and name in joined and not _excludes(joined[name], node, facts) for name in names
                ):
                    yield _rotated_after_cache(call, node, function)
            elif isinstance(call, ast.Call) and _joins_cache(call):
                joined.update({name: node for name in names if _KEYS.match(name)})
            elif isinstance(call, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                for target, part in zip(node.targets[0].elts, call.elts, strict=False):
                    if isinstance(part, ast.Call) and _joins_cache(part):
                        joined.update({name: node for name in bound_names(target) if _KEYS.match(name)})
        for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
            inner = [one for one in call.args if isinstance(one, ast.Call) and _is_rotary(one)]
            for one in inner if last_name(call.func) == "scaled_dot_product_attention" else ():
                if any(name in joined for argument in one.args for name in bound_names(argument)):
                    yield Report(one, "keys of the cache are rotated again with the new ones: rotate, then append")


def _rotated_after_cache(call: ast.Call, rotation: ast.Assign, function: Function) -> Report:
    """The report of joined keys that are rotated: wrong, or, of a cache of keys as they are, the cost of each step."""
    if _is_kept_unrotated(function, rotation):
        return Report(
            call,
            "each step rotates all keys of the cache: rotate the new ones, then append",
            unless="positions of cached keys move",
        )
    return Report(call, "keys of the cache are rotated again with the new ones: rotate, then append")


def _is_kept_unrotated(function: Function, rotation: ast.Assign) -> bool:
    """Whether a function stores keys before any of its statements rotates keys, so that those of the cache are not."""
    stores, rotations = [], [rotation.lineno]
    for node in _assignments(function):
        written = " ".join(ast.unparse(one) for one in node.targets)
        read = any(map(_KEYS.match, names_below(node.value)))
        if read and re.search(r"past|cache|prev|present|state|layer_past", written):
            stores.append(node.lineno)
        if read and any(isinstance(one, ast.Call) and _is_rotary(one) for one in ast.walk(node.value)):
            rotations.append(node.lineno)
    return any(line < min(rotations) for line in stores)


def _decays(call: ast.Call) -> bool:
    """Whether keys are also scaled by their distance from the last position, as xPos does: that of old ones changes."""
    return any(one.arg is not None and "scale" in one.arg for one in call.keywords)


def _excludes(one: ast.stmt, other: ast.stmt, facts: ModuleFacts) -> bool:
    """Whether two statements are in different branches of one condition."""
    branches: dict[ast.AST | None, list[ast.stmt]] = {}
    for node in around(one, facts):
        above = facts.parents.get(node)
        if isinstance(above, ast.If):
            branches[above] = above.body if node in above.body else above.orelse
    pairs = ((node, branches.get(facts.parents.get(node))) for node in around(other, facts))
    return any(branch is not None and node not in branch for node, branch in pairs)


def _assignments(function: Function) -> Iterator[ast.Assign]:
    return (node for node in ast.walk(function) if isinstance(node, ast.Assign))


def _joins_cache(call: ast.Call) -> bool:
    is_join = last_name(call.func) in ("cat", "concat", "concatenate")
    return is_join and bool(_CACHED.search(ast.unparse(call)))


@rule("ATT503", Severity.ERROR)
def positions_in_half(facts: ModuleFacts) -> Iterator[Report]:
    """Positions are counted in half precision."""
    for event in facts.operations("arange"):
        dtype = _default(event.term.get("dtype"), facts)
        if dtype is None or dtype.op != "name" or dtype.value not in _EXACT_UP_TO:
            continue
        last = number(event.term.items[0 if len(event.term.items) == 1 else 1]) if event.term.items else None
        if (last is None or last > _EXACT_UP_TO[dtype.value]) and counts_positions(event, facts):
            yield Report(
                event.term.node,
                f"positions in {str(dtype.value).removeprefix('torch.')} are not exact: count in float32",
            )


_EXACT_UP_TO = {"torch.bfloat16": 256, "torch.float16": 2048, "torch.half": 2048}
"""The whole numbers that these dtypes hold, each up to this one."""
_POSITION_NAMES = re.compile(
    r"pos|^t$|^seq|freq|angle|theta|alibi|slope|dist|rotary|(^|_)rope|sinus|idx|indices|timing", re.I
)


def counts_positions(event: Event, facts: ModuleFacts) -> bool:
    """Whether what is counted are positions: by its name, that of the function or class, or its products."""
    names = [one.name for one in (event.function, event.class_) if one is not None]
    assigned = statement_around(event.term.node, facts)
    if isinstance(assigned, ast.Assign):
        names += [ast.unparse(one).removeprefix("self.") for one in assigned.targets]
    if any(_POSITION_NAMES.search(name) for name in names):
        return True
    return any(
        one.op in ("einsum", "matmul") or (one.op == "call" and str(one.value).endswith(".outer"))
        for one in facts.consumers.get(id(event.term), [])
    )


def _default(term: Term | None, facts: ModuleFacts) -> Term | None:
    """A value, or the default of the parameter that it is, where that is a name such as `torch.float16`."""
    found = default_of(term, facts) if term is not None and term.op == "parameter" else None
    written = ast.unparse(found) if isinstance(found, ast.Attribute) else ""
    return Term("name", term.node, value=written) if term is not None and written.startswith("torch.") else term


@rule("ATT504", Severity.WARNING)
def missing_positions(facts: ModuleFacts) -> Iterator[Report]:
    """Embedded tokens go into a Transformer without any information of their positions."""
    code = re.sub(r"#[^\n]*", "", facts.source)
    if _POSITIONS.search(code):
        return
    message = "nothing tells this Transformer the positions of its tokens: add positions to them"
    for event in facts.applied("torch.nn.TransformerEncoder", "torch.nn.Transformer"):
        source = event.term.get("src")
        if source is not None and (_embeds_tokens_alone(source) or _reads_last_of_projected(event.term, source, facts)):
            yield Report(event.term.node, message)
    reported = set()
    for site in facts.sites:
        call = site.event.call
        alike = projection_name(site.query) == projection_name(site.key) == "torch.nn.Linear"
        if call is None or call in reported or not alike or not _embeds_tokens_alone(source_of(site.query)):
            continue
        if _embeds_tokens_alone(source_of(site.key)) and not _has_bias(site):
            reported.add(call)
            yield Report(call, message)


def _has_bias(site: AttentionSite) -> bool:
    """Whether anything but a mask of a known shape is added to the scores: it may be a bias by distance."""
    if site.kind == "formula":
        added = [step.operand for step in site.before if step.op in ("add", "sub") and step.operand is not None]
        return any(mask_values(one) is None and number(one) is None for one in added)
    names = ("attn_mask", "score_mod", "block_mask", "**")
    given = [one for name in names if (one := site.output.get(name)) is not None and not is_none(one)]
    return any(mask_values(one) is None for one in given)


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
    if source.op != "apply" or source.value != "torch.nn.Linear" or source.input.op != "parameter":
        return False
    if any(not is_none(output.get(name)) for name in ("mask", "is_causal")):
        return False
    return any(
        one.op == "item" and len(one.items) == 2 and one.items[0].op == "slice" and number(one.items[1]) == -1
        for one in facts.consumers.get(id(output), [])
    )


@rule("ATT241", Severity.ERROR)
def attention_without_mask_function(facts: ModuleFacts) -> Iterator[Report]:
    """An attention function is registered with transformers, and no mask function under its name."""
    calls = [
        (node, ast.unparse(node.func))
        for node in facts.nodes[ast.Call]
        if node.args and last_name(node.func) == "register"
    ]
    registered = [
        (call, call.args[0])
        for call, name in calls
        if re.search(r"(^|\.)(AttentionInterface|ALL_ATTENTION_FUNCTIONS)(\(\))?\.register$", name)
    ]
    masks = {
        ast.unparse(call.args[0])
        for call, name in calls
        if re.search(r"(^|\.)(AttentionMaskInterface|ALL_MASK_ATTENTION_FUNCTIONS)(\(\))?\.register$", name)
    }
    masks |= {
        ast.unparse(node.slice)
        for node in facts.nodes[ast.Subscript]
        if last_name(node.value) == "ALL_MASK_ATTENTION_FUNCTIONS"
    }
    for call, name in registered:
        if _OF_PICTURES.search(" ".join(map(ast.unparse, call.args))) or getattr(name, "value", None) in _HAS_MASKS:
            continue
        if ast.unparse(name) not in masks and len(call.args) >= 2 and _may_read_mask(call.args[1], facts):
            yield Report(
                call,
                f"the attention function {ast.unparse(name)} is registered without a mask function of that name: its "
                "mask is None; register one with AttentionMaskInterface",
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
        compared = test.test
        function = function_around(test, facts)
        if not (isinstance(compared, ast.Compare) and isinstance(compared.ops[0], ast.NotIn) and function is not None):
            continue
        store = ast.unparse(compared.comparators[0])
        kept = [one for body in test.body for one in ast.walk(body) if isinstance(one, ast.Assign)]
        stores = [one for one in kept if any(ast.unparse(target).startswith(f"{store}[") for target in one.targets)]
        arguments = {one.arg for one in parameters(function)}
        values = dict(_named_assignments(function))
        key = _read(compared.left, values)
        for one in stores:
            missing = (_read(one.value, values) & arguments & _POSITION_NUMBERS) - key
            if missing:
                name = min(missing)
                yield Report(one, f"this is kept without `{name}` in its key: another {name} gets the same numbers")


_POSITION_NUMBERS = frozenset({"offset", "start", "start_pos", "position", "base", "theta", "scale", "factor", "past"})


def _named_assignments(function: Function) -> Iterator[tuple[str, ast.Assign]]:
    for one in ast.walk(function):
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
            yield one.targets[0].id, one


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
