"""Keys that are joined with those of a cache, and the branches in which there is none."""

from __future__ import annotations

import ast
import re

from ..attention_sites import names_in
from ..module_facts import ModuleFacts
from ..term import Term, indices, is_none, label, number, walk
from .base import function_around, within_function

_MOVED = frozenset({"transpose", "reshape", "flatten", "expand", "repeat_interleave", "cast", "unsqueeze", "item"})
CACHE_NAMES = re.compile(r"past|cache|prev(ious)?_|memory_k|k_?cache|history", re.I)


def is_without_cache(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node stands in the branch of a condition that is taken where there is no cache, or none is allowed."""
    asserted = [one.test for one in ast.walk(function_around(node, facts) or node) if isinstance(one, ast.Assert)]
    if any(re.search(r"\bis None$", test := ast.unparse(one)) and CACHE_NAMES.search(test) for one in asserted):
        return True
    for inner in within_function(node, facts):
        above = facts.parents.get(inner)
        if isinstance(above, ast.If) and inner is not above.test:
            test = ast.unparse(above.test)
            negated = re.search(r"^not |is None|== 0", test) is not None
            if CACHE_NAMES.search(test) and (inner in above.body) == negated:
                return True
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
    parts = indices(changed)
    if parts and parts[0].op == "constant" and parts[0].value is ... and len(parts) == 2:
        return False  # features: halves that are rotated
    return any(one.op == "slice" and not is_none(one.items[0]) and number(one.items[0]) is None for one in parts)


def _names_a_cache(term: Term) -> bool:
    return any(CACHE_NAMES.search(name) for name in names_in(term))
