"""The roles that heads were found to have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import AtlasError

ENTRIES = {"name": str, "score": (int, float), "n": int, "rule": str}


def checked_roles(roles: Any, maps: Sequence[tuple[str, int]]) -> list[list[list[dict[str, Any]]]]:
    """Roles for maps of these names and heads, as plain lists.

    Raises:
        AtlasError: they are not that.
    """
    if not _is_list(roles, len(maps)):
        raise AtlasError(f"roles need one entry for each of the {len(maps)} maps; they are {_size(roles)}")
    return [_of_map(of, name, heads) for of, (name, heads) in zip(roles, maps, strict=True)]


def _of_map(roles: Any, name: str, heads: int) -> list[list[dict[str, Any]]]:
    if not _is_list(roles, heads):
        raise AtlasError(f"the roles of {name!r} need one list for each of its {heads} heads; they are {_size(roles)}")
    for of_head in roles:
        if not _is_list(of_head) or not all(_is_role(role) for role in of_head):
            raise AtlasError(
                f"a role of {name!r} needs to be {{'name': word, 'score': number, 'n': whole number, 'rule': word}}; "
                f"one head has {str(of_head)[:120]}"
            )
    return [[dict(role) for role in of_head] for of_head in roles]


def _is_role(role: Any) -> bool:
    return (
        isinstance(role, Mapping)
        and set(role) == set(ENTRIES)
        and all(isinstance(role[name], kind) and not isinstance(role[name], bool) for name, kind in ENTRIES.items())
        and math.isfinite(role["score"])
    )


def _is_list(value: Any, count: int | None = None) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and (count is None or len(value) == count)


def _size(value: Any) -> str:
    return f"{len(value)}" if isinstance(value, Sequence) else f"a {type(value).__name__}"
