"""Rules about decoding with a cache: positions, unfilled cells, biases, windows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..finding import Severity
from ..module_facts import ModuleFacts
from ..python_syntax import below, last_name, names_below
from ..term import ABSENT, Term, indices, is_none, label, number, through, walk
from .base import Report, rule
from .cached_keys import begins_later, is_cached
from .mask_uses import may_be_masked

_LAYERS = frozenset({"matmul", "softmax", "sdpa"})


@rule("ATT512", Severity.ERROR)
def positions_from_zero(facts: ModuleFacts) -> Iterator[Report]:
    """Positions are counted from 0 in each call, and the keys of a cache were counted from 0 too."""
    cached = {facts.function_around(site.place) for site in facts.sites if is_cached(site.key)} - {None}
    for event in facts.operations("arange"):
        length = event.term.items[0] if len(event.term.items) == 1 else ABSENT
        of_input = length.op == "size" and length.value in (1, -2) and not _is_of_keys(length.input)
        counts = of_input and event.depth == 0 and facts.function_around(event.node) in cached
        if counts and _becomes_positions(event.term, facts):
            yield Report(event.node, "these positions begin at 0 in every call: add the number of cached keys")
    yield from _moved_by_another_input(facts)


def _moved_by_another_input(facts: ModuleFacts) -> Iterator[Report]:
    """Loops over steps whose position moves on by the length of something else than what the step reads."""
    sized = re.compile(r"(\w+)\.(?:size|shape)")
    for loop in (*facts.nodes[ast.For], *facts.nodes[ast.While]):
        counted = {
            ast.unparse(call.args[0]): sized.findall(ast.unparse(call.args[1]))
            for call in below(loop, ast.Call)
            if last_name(call.func) == "arange" and len(call.args) == 2
        }
        bound = names_below(loop, ast.Store) if counted else set()
        for step in (one for one in below(loop, ast.AugAssign) if counted and isinstance(one.op, ast.Add)):
            read, moved = counted.get(ast.unparse(step.target), []), sized.findall(ast.unparse(step.value))
            if read and moved and not {*moved} & {*read, *bound}:
                yield Report(
                    step, f"each step moves the position by the length of `{moved[0]}`, which it does not read"
                )


def _is_of_keys(term: Term) -> bool:
    """Whether a length is that of keys which are joined with those of the cache, or of what a cache stores."""
    return is_cached(term) or any(one.op == "cat" for one in walk(term, stop=_LAYERS))


def _becomes_positions(term: Term, facts: ModuleFacts, depth: int = 6) -> bool:
    """Whether counted positions are embedded or multiplied by frequencies, and nothing is added to them before."""
    if facts.uses(term, "add", "less", "less_equal", "greater", "greater_equal", "sub", "choice"):
        return False
    for one in facts.uses(term):
        embedded = one.applies("torch.nn.Embedding")
        if embedded or (one.op == "call" and _ROTATES.search(label(one))):
            return True
        if one.op in ("mul", "einsum") or (one.op == "call" and str(one.value).endswith(".outer")):
            return _is_angle(one, facts)
        if depth and one.op in ("item", "unsqueeze", "cast", "expand") and _becomes_positions(one, facts, depth - 1):
            return True
    return False


_ROTATES = re.compile(r"^apply_rot|^apply_rope|^rotate_(half_)?queries|^rotary$|^apply_rotary_(pos_)?emb$", re.I)


def _is_angle(term: Term, facts: ModuleFacts) -> bool:
    """Whether the cosine of a product is taken, directly or by the function that gets it."""
    return any(str(one.value).rpartition(".")[2] in ("cos", "sin") for one in facts.uses(term))


@rule("ATT513", Severity.ERROR)
def unfilled_cells(facts: ModuleFacts) -> Iterator[Report]:
    """All of a preallocated cache takes part in attention, the cells too that nothing was written into yet."""
    message = "keys of a preallocated cache that are not written yet take part: cut it to its length, or mask the rest"
    for site in facts.sites:
        if not may_be_masked(site) and _is_whole_buffer(site.key):
            yield Report(site.node, message)


def _is_whole_buffer(key: Term) -> bool:
    """Whether keys are a tensor of a fixed length, of which a slice was written just before."""
    key = through(key, "transpose", "cast", "permute", "carried")
    if key.op != "setitem":
        return False
    base, value = key.input, key.get("value")
    slices = [one for one in indices(key) if one.op == "slice" and not is_none(one.items[1])]
    stored = base.op in ("zeros", "attribute") or base.value in ("torch.empty", "torch.zeros")
    return stored and value is not None and number(value) is None and any(map(begins_later, slices))


@rule("ATT514", Severity.ERROR)
def bias_without_cache(facts: ModuleFacts) -> Iterator[Report]:
    """The bias by distance is added without a cache only, and is missing in each decoding step."""
    if not facts.sites:
        return
    for node in facts.nodes[ast.If]:
        if node.orelse or not re.fullmatch(r"[\w.]*(cache|past)[\w.]* is None", ast.unparse(node.test)):
            continue
        for statement in node.body:
            value = _added(statement)
            if value is not None and re.search(r"alibi|slope|rel(ative)?_|position_bias|distance", value, re.I):
                yield Report(statement, "with a cache this bias is left out: add its rows of the new queries")


def _added(statement: ast.stmt) -> str | None:
    """What a statement adds to a name: the right side of `x += y`, or of `x = x + y`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        return ast.unparse(statement.value)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        target, sum_ = ast.unparse(statement.targets[0]), statement.value
        if isinstance(sum_.op, ast.Add) and ast.unparse(sum_.left) == target:
            return ast.unparse(sum_.right)
    return None


@rule("ATT515", Severity.WARNING)
def window_cut_before_attention(facts: ModuleFacts) -> Iterator[Report]:
    """Keys are cut to the last window before the new queries have read them."""
    for site in facts.sites:
        cut = _cut(site.key)
        if cut is not None and _is_kept(cut, facts):
            yield Report(
                cut.node, "the first queries of a chunk lose keys of their windows: attend, then cut the cache"
            )


def _is_kept(cut: Term, facts: ModuleFacts) -> bool:
    """Whether the keys that are left are returned or stored, as those of the next step."""
    waiting = [cut]
    for one in waiting:  # grows while it is read
        if facts.uses(one, "return", "store"):
            return True
        passed_on = facts.uses(one, "tuple", "dict", "call", "instance", "choice", "setitem", "cast")
        waiting += [other for other in passed_on if other not in waiting]
    return False


def _cut(key: Term) -> Term | None:
    """The slice of the last keys, of a number that is not fixed, of those of a cache and the new ones."""
    key = through(key, "transpose", "cast", "permute")
    if key.op == "choice":
        return next((found for one in key.items if (found := _cut(one)) is not None), None)
    if key.op != "item" or key.input.op != "cat" or not is_cached(key.input):
        return None
    slices = [one for one in key.items if one.op == "slice" and one.items[0].op == "negative"]
    return key if slices and is_none(slices[0].items[1]) and number(slices[0].items[0]) is None else None
