"""Checks of whole numbers in settings."""

from __future__ import annotations

import operator

from ..errors import ConfigurationError, RegardError


def whole_number(name: str, value: object, *, least: int = 1, error: type[RegardError] = ConfigurationError) -> int:
    """Check that a value is a whole number of at least `least`, and return it.

    Raises:
        ConfigurationError, or `error`: it is not that.

    >>> whole_number("num_heads", 8)
    8
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise error(f"{name} needs a whole number; it is {value!r}")
    if number < least:
        raise error(f"{name} is {number}; it needs at least {least}")
    return number
