"""Keys that are joined with those of a cache, and the branches in which there is none."""

from __future__ import annotations

import ast
import re

from ..attention_sites import names_in
from ..module_facts import ModuleFacts
from ..term import Term, indices, is_none, label, lineage, number, walk

_MOVED = ("transpose", "reshape", "flatten", "expand", "repeat_interleave", "cast", "unsqueeze")
CACHE_NAMES = re.compile(r"past|cache|prev(ious)?_|memory_k|k_?cache|history", re.I)


def is_without_cache(node: ast.AST, facts: ModuleFacts) -> bool:
    """Whether a node stands in the branch of a condition that is taken where there is no cache, or none is allowed."""
    asserted = (ast.unparse(one.test) for one in facts.beside(node, ast.Assert))
    if any(test.endswith(" is None") and CACHE_NAMES.search(test) for test in asserted):
        return True
    for inner in facts.within_function(node):
        above = facts.parents.get(inner)
        if isinstance(above, ast.If) and inner is not above.test:
            test = ast.unparse(above.test)
            negated = re.search(r"^not |is None|== 0", test) is not None
            if CACHE_NAMES.search(test) and (inner in above.body) == negated:
                return True
    return False


def is_cached(key: Term) -> bool:
    """Whether keys are, on some path, joined from those of a cache and new ones."""
    *_, key = lineage(key, *_MOVED)
    if key.op in ("element", "item") and key.input.op == "method":
        return key.input.value in _CACHE_METHODS and _names_a_cache(key.input.input)
    if key.op == "item":
        return is_cached(key.input)
    if key.op == "choice":
        return any(is_cached(one) for one in key.items)
    if key.op == "cat" and key["tensors"].items and number(key["dim"]) != -1:  # not features, as rotated halves are
        return _is_of_cache(key["tensors"].items[0])
    return key.op == "setitem" and _is_written_part(key)


def _is_of_cache(joined: Term) -> bool:
    """Whether keys with which others are joined are those of a cache: by a name, or as an attribute."""
    if joined.op in ("add", "sub", "mul", "negative"):  # rotated halves too, by a cached table
        return False
    made = {one.op for one in walk(joined)}
    stored = joined.op in ("item", "loop_item") and "attribute" in made and not made & {"apply", "matmul"}
    return _names_a_cache(joined) or stored or _is_stored_key(joined)


_CACHE_METHODS = ("update", "extend", "append", "add", "concat", "put", "store", "push")
"""Methods of a cache that return the keys and values of all calls."""


def _is_stored_key(term: Term) -> bool:
    """Whether keys are an attribute that methods change, of an object: those of the calls before."""
    return term.op == "attribute" and term.input.op in ("instance", "self") and bool(re.search(r"key|^k$", label(term)))


def _is_written_part(changed: Term) -> bool:
    """Whether new keys are written into a part of a longer tensor, and not into features, as rotated halves are."""
    parts = indices(changed)
    of_features = len(parts) == 2 and parts[0].value is ...
    return not of_features and any(begins_later(one) for one in parts)


def begins_later(part: Term) -> bool:
    """Whether a slice has a beginning that is not fixed: the number of cells that are filled."""
    return part.op == "slice" and not is_none(part.items[0]) and number(part.items[0]) is None


def _names_a_cache(term: Term) -> bool:
    return any(CACHE_NAMES.search(name) for name in names_in(term))
