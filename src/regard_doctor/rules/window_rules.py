"""Rules about pairs that are shown and should not be: by windows, documents and blocks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from ..attention_sites import names_in
from ..expression_evaluation import OPERATORS
from ..finding import Severity
from ..mask_values import NUMPY_OPERATORS, hidden_triangle
from ..module_facts import ModuleFacts
from ..python_syntax import Function, below, code_of, last_name, names_below
from ..term import ABSENT, Term, label, same, through, walk
from .base import Report, rule
from .mask_rules import true_at
from .mask_uses import is_counted, mask_uses, parts_that_hide, resolved, site_masks

_QUERY = re.compile(r"^(q|query|i|row|m)_?(idx|index|i|pos|position)?$", re.I)
_KEY = re.compile(r"^(k|kv|key|j|col|n)_?(idx|index|i|pos|position)?$", re.I)
_DOCUMENTS = re.compile(r"doc|segment|seq(uence)?_?ids?|pack|sample_?ids?|episode", re.I)
_LENGTH = 6
"""Positions for which the function of a mask is evaluated."""
_FREE = 2
"""The value of a window or block: of names that are no position, and of numbers that a few positions do not reach."""
_FUNCTIONS = {**NUMPY_OPERATORS, "floordiv": np.floor_divide, "mod": np.mod}
_OPERATORS = {kind: _FUNCTIONS[op] for kind, op in OPERATORS.items() if op in _FUNCTIONS}


class _Unknown(Exception):
    """The function of a mask reads something else than positions and numbers."""


def _is_joined(result: ast.expr, facts: ModuleFacts) -> bool:
    """Whether the file joins the function that a result is of, or one that returns it, with others by `and_masks`."""
    function = next((one for one in facts.nodes[ast.FunctionDef] if _spans(one, result)), None)
    names = {one.name for one in facts.around(function) if isinstance(one, Function)}
    return any(names & names_below(one) for one in facts.nodes[ast.Call] if last_name(one.func) == "and_masks")


def _spans(function: ast.FunctionDef, result: ast.expr) -> bool:
    """Whether the last statement of a function has the lines of a result."""
    return function.body[-1].lineno <= result.lineno <= (function.end_lineno or 0)


def _mask_functions(facts: ModuleFacts) -> Iterator[tuple[ast.expr, str, str]]:
    """The result and the names of query and key of each function of (batch, head, query, key)."""
    if not re.search(r"flex_attention|create_block_mask|mask_mod|BlockMask", facts.source):
        return
    for function in (*facts.nodes[ast.FunctionDef], *facts.nodes[ast.Lambda]):
        names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        if len(names) != 4 or not _QUERY.match(names[2]) or not _KEY.match(names[3]):
            continue
        match function.body:
            case ast.expr() as result:
                yield result, names[2], names[3]
            case [*before, ast.Return(value=ast.expr() as result)]:
                assigned = (one for one in before if isinstance(one, ast.Assign))
                values = {target.id: one.value for one in assigned if isinstance(target := one.targets[0], ast.Name)}
                yield _Substituted(values).visit(deepcopy(result)), names[2], names[3]


class _Substituted(ast.NodeTransformer):
    """Replaces the names that a function assigns by their values, in a copy of its result."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self.values.get(node.id, node))


def _evaluated(node: ast.expr, positions: dict[str, NDArray]) -> NDArray:
    """The values of an expression for all positions of queries and keys."""

    def of(part: ast.expr) -> NDArray:
        return _evaluated(part, positions)

    match node:
        case ast.Constant(value=bool() | int() as value):
            return np.array(value if value < _LENGTH - 1 else _FREE)
        case ast.Name(id=name):
            return positions.get(name, np.array(_FREE))
        case ast.Attribute():
            return np.array(_FREE)
        case (
            ast.BinOp(left=left, op=operator, right=right) | ast.Compare(left=left, ops=[operator], comparators=[right])
        ) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](of(left), of(right))
        case ast.BoolOp(op=operator, values=values):
            join = np.logical_and if isinstance(operator, ast.And) else np.logical_or
            return join.reduce(np.broadcast_arrays(*map(of, values)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -of(operand)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return np.logical_not(of(operand))
        case ast.Call(func=ast.Name(id="abs") | ast.Attribute(attr="abs"), args=[argument]):
            return np.abs(of(argument))
    raise _Unknown


@rule("ATT216", Severity.ERROR)
def unbounded_window(facts: ModuleFacts) -> Iterator[Report]:
    """A window bounds how far back a query sees, and not that it sees the future."""
    for result, query, key in _mask_functions(facts):
        index = np.arange(_LENGTH)
        try:
            with np.errstate(all="raise"):
                shown = _evaluated(result, {query: index[:, None], key: index[None]}).astype(bool)
        except (_Unknown, TypeError, FloatingPointError):
            continue
        shown = np.broadcast_to(shown, (_LENGTH, _LENGTH))
        future, past = shown[np.triu_indices(_LENGTH, 1)].all(), shown[np.tril_indices(_LENGTH, -1)]
        distances = shown[1:, 0].tolist()
        falls = future and past.any() and not past.all() and sorted(distances, reverse=True) == distances
        if falls and not _is_joined(result, facts):
            yield Report(result, "this window has no bound on the side of the future: add that the query is not before")


@rule("ATT217", Severity.ERROR)
def joined_documents(facts: ModuleFacts) -> Iterator[Report]:
    """The causal mask and that of documents, or of padding, are joined by *or* instead of *and*."""
    message = "documents or causal shows the past of other documents and the own future: use `&`"
    padded = "words or causal shows the future, and padding of the past: use `&`"
    for result, query, key in _mask_functions(facts):
        joined = (one for one in below(result, ast.BinOp) if isinstance(one.op, ast.BitOr))
        for sides in ((one.left, one.right) for one in joined):
            if any(map(_is_same_document, sides)) and any(_is_order(one, query, key) for one in sides):
                yield Report(result, message)
    for one in _mask_parts(facts):
        parts = _joined_to_causal(one) if one.op == "or" else []
        if any(map(_is_of_documents, parts)):
            yield Report(one.node, message)
        elif any(map(_shows_words, parts)):
            yield Report(one.node, padded)


def _mask_parts(facts: ModuleFacts) -> Iterator[Term]:
    """The operations that the masks of sites are made by."""
    return (one for site in facts.sites for mask, _ in site_masks(site) for one in walk(mask))


def _is_same_document(node: ast.expr) -> bool:
    """Whether an expression compares the entries of one tensor of documents."""
    match node:
        case ast.Compare(left=left, ops=[ast.Eq(), *_], comparators=[right, *_]):
            bases = {ast.unparse(one.value) for one in (left, right) if isinstance(one, ast.Subscript)}
            return len(bases) == 1 and bool(_DOCUMENTS.search(bases.pop()))
    return False


def _is_order(node: ast.expr, query: str, key: str) -> bool:
    return ast.unparse(node) in (f"{query} >= {key}", f"{key} <= {query}", f"{query} > {key}", f"{key} < {query}")


def _joined_to_causal(term: Term) -> list[Term]:
    """What a causal mask that is True where it shows is joined with; nothing where there is none."""
    sides = list(term.operands())
    causal = [hidden_triangle(one, true_hides=False, as_booleans=True) == "future" for one in sides]
    return [one for one, is_causal in zip(sides, causal, strict=True) if not is_causal] if any(causal) else []


def _is_of_documents(mask: Term) -> bool:
    mask = through(mask, "unsqueeze", "item", "expand", "cast")
    return mask.op == "equal" and any(map(_DOCUMENTS.search, names_in(mask)))


def _shows_words(mask: Term) -> bool:
    """Whether a mask is True at words: one of keys, or one of keys and queries; that of lengths may be of a prefix."""
    mask = through(mask, "unsqueeze", "item", "expand", "cast", "bool")
    if mask.op == "and":
        return all(map(_shows_words, mask.operands()))
    return mask.op not in ("less", "less_equal", "greater", "greater_equal") and true_at(mask) == "words"


@rule("ATT218", Severity.ERROR)
def own_block_mean(facts: ModuleFacts) -> Iterator[Report]:
    """A query sees the mean of its own block, which has tokens that come later."""
    for site in facts.sites:
        for mask, _ in site_masks(site) if _has_block_means(site.key) else ():
            for one in walk(mask):
                own = {"less_equal": ("other", "input"), "greater_equal": ("input", "other")}.get(one.op, ("", ""))
                if one[own[0]].op == "floordiv" and is_counted(one[own[1]]):
                    yield Report(one.node, "the mean of a query's own block has later tokens: compare with > here")


def _has_block_means(key: Term) -> bool:
    made = walk(key, stop=frozenset({"apply", "matmul"}))
    return any(one.op == "mean" and one.input.op in ("unflatten", "reshape") for one in made)


@rule("ATT219", Severity.HINT)
def window_one_wider(facts: ModuleFacts) -> Iterator[Report]:
    """A causal window of a stated size has one key more: the distances from 0 to the size."""
    unless = "it counts the keys before the query, without its own"
    for pair in _flash_windows(facts):
        message = "the window of flash-attn has the query's own key besides: this is one key more"
        yield Report(pair, message, unless=unless)
    for one in _mask_parts(facts):
        right = one["other"]
        if one.op == "less_equal" and one.input.op == "sub" and _states_size(right):
            yield Report(one.node, f"distances up to {ast.unparse(right.node)} are one key more", unless=unless)
        if _reaches_a_size(one, right):
            yield Report(one.node, "a distance of the size that it names is one key more", unless=unless)
        if one.op == "sub" and right.op == "tril" and _is_one_below(right["diagonal"]):
            yield Report(one.node, "this leaves one key more than the size that it names", unless=unless)


_SIZE = re.compile(
    r"^(window|window_size|sliding_window|sliding_window_size|local_window|attention_window|win(_size)?)$"
)


def _reaches_a_size(compared: Term, right: Term) -> bool:
    """Whether a comparison is `q <= k + size` or `k >= q - size`, of counted positions."""
    added = compared.op == "less_equal" and right.op == "add" and any(map(_states_size, right.operands()))
    taken = compared.op == "greater_equal" and right.op == "sub" and _states_size(right["other"])
    sides = (compared.input, right)
    return (added or taken) and all(any(one.op == "arange" for one in walk(side)) for side in sides)


def _states_size(term: Term) -> bool:
    return term.op in ("parameter", "attribute") and bool(_SIZE.match(label(term)))


def _is_one_below(diagonal: Term) -> bool:
    """Whether a diagonal is -size - 1, or -(size + 1)."""
    found = re.fullmatch(r"-(?:self\.)?(\w+) - 1|-\((?:self\.)?(\w+) \+ 1\)", ast.unparse(diagonal.node))
    return found is not None and bool(_SIZE.match(found[1] or found[2]))


def _flash_windows(facts: ModuleFacts) -> Iterator[ast.Tuple]:
    """The pairs that flash-attn gets as `window_size`, in a call or a dict, and that begin with the size itself."""
    for node in facts.nodes[ast.Tuple] if "flash_attn" in facts.source else ():
        name = ""
        match facts.parents.get(node):
            case ast.keyword(arg=str(name)) | ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=str(name)))]):
                pass
            case ast.Dict(keys=keys, values=values) if node in values:
                name = code_of(keys[values.index(node)]).strip("'")
        if name == "window_size" and len(node.elts) == 2 and _SIZE.match(last_name(node.elts[0])):
            yield node


@rule("ATT224", Severity.ERROR)
def difference_of_infinities(facts: ModuleFacts) -> Iterator[Report]:
    """The log-sum-exp of a block that is hidden as a whole is -inf, and -inf - -inf is NaN."""
    for event in facts.judged("exp"):
        difference = event.term.input if event.term.input.op == "sub" else ABSENT
        scores, total = difference["input"], difference["other"]
        of_scores = scores in (total["input"], *total.items[:1]) and _may_be_hidden(scores)
        if of_scores and str(total.value).rpartition(".")[2] == "logsumexp":
            yield Report(event.node, "where every score is -inf, lse is -inf too and this is NaN: subtract 0 there")


def _may_be_hidden(scores: Term) -> bool:
    """Whether all scores are -inf on one path."""
    if scores.op == "choice":
        return any(_may_be_hidden(one) for one in scores.items)
    return scores.op in ("full", "full_like") and "inf" in ast.unparse(scores.node)


@rule("ATT220", Severity.ERROR)
def other_documents(facts: ModuleFacts) -> Iterator[Report]:
    """A mask of documents hides the own one and shows the others."""
    for use in mask_uses(facts):
        parts = (parts_that_hide(one, use.true_hides, "item", "reshape") for one in resolved(use.mask))
        for mask, hides in chain.from_iterable(parts):
            if mask.op == ("equal" if hides else "not_equal") and _compares_itself(mask):
                yield Report(mask.node, "this mask hides a position from its own document: compare the other way")


def _compares_itself(mask: Term) -> bool:
    """Whether a comparison is of one array with itself, along two axes."""
    sides = (mask["input"], mask["other"])
    one, other = (through(side, "unsqueeze", "item", "expand", "reshape", "transpose") for side in sides)
    return (one, other) != sides and one.op in ("parameter", "attribute", "element") and same(one, other)
