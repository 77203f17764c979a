"""Evidence of many sentences that is to be added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import ConfigurationError, ShapeError

Part = TypeVar("Part")


def of_the_same_heads(parts: Iterable[Part], shape: Callable[[Part], tuple[int, ...]]) -> list[Part]:
    """The parts, one at least, all of heads of one shape.

    Raises:
        ConfigurationError: there is none.
        ShapeError: they are not of the same heads.

    >>> of_the_same_heads([3, 4], lambda part: (6, 12))
    [3, 4]
    """
    parts = list(parts)
    if not parts:
        raise ConfigurationError("there is no evidence to add up: give at least one part")
    shapes = {shape(part) for part in parts}
    if len(shapes) > 1:
        raise ShapeError(f"evidence of heads of the shapes {sorted(shapes)} does not add up: they need to be one")
    return parts
