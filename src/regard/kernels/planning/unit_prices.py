"""Prices of the units of work that kernels count: what each costs in passes or calls, from `unit_prices.json`.

A constant of a price in a kernel's file is `price("sdpa.bias_calls")`; the file says what it is of, and which command
measures it. `regard bench --units` fits them to measured times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypedDict

PRICES = Path(__file__).with_name("unit_prices.json")


class HeldPrice(TypedDict):
    """A price in the file: its value, what it is of, and the command that measures it."""

    value: float
    of: str
    command: str


@cache
def held_prices() -> dict[str, HeldPrice]:
    """All prices by name, each value an object of its own."""
    held = json.loads(PRICES.read_text("utf-8"))
    return {
        name: HeldPrice(value=float(own["value"]), of=own["of"], command=own["command"]) for name, own in held.items()
    }


def price(name: str) -> float:
    """The price of that name, always the same object.

    >>> price("unit_costs.operator") > 0
    True
    """
    return held_prices()[name]["value"]


@contextmanager
def at_another_price(name: str, value: float) -> Iterator[None]:
    """Put a price in place of another within the block, in all modules of kernels that have it as a constant."""
    held = price(name)
    places = [
        (module, constant)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("regard.kernels")
        for constant, found in list(vars(module).items())
        if found is held
    ]
    try:
        for module, constant in places:
            setattr(module, constant, value)
        yield
    finally:
        for module, constant in places:
            setattr(module, constant, held)
