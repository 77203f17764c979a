"""Checks of numbers in settings and arguments."""

from __future__ import annotations

import operator
from typing import Any

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


def lies_between(least: float, number: Any, most: float) -> bool:
    """Whether least < number < most; False for NaN, for a bool, and for what is no number, which cannot be compared.

    number: a float, or a number of torch's or numpy's, or a symbol of torch.compile's.

    >>> lies_between(0.0, 0.5, 1.0), lies_between(0.0, "0.5", 1.0), lies_between(0.0, True, 2.0)
    (True, False, False)
    """
    if isinstance(number, bool):
        return False
    try:
        return bool(least < number < most)
    except (TypeError, ValueError, RuntimeError):  # an array or a tensor of several numbers, or of complex ones
        return False


def truth_value(name: str, value: object) -> bool:
    """Check that a value is True or False, and return it.

    Raises:
        ConfigurationError: it is not; "no" and 0.5 would count as True.

    >>> truth_value("causal", False)
    False
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} is {value!r}; it needs True or False")
    return value
