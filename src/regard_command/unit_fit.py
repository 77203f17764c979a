"""Prices of the units of work, fitted to measured times: the table of `regard bench --units`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from regard import explain
from regard.core.problem import Problem
from regard.kernels import Kernel
from regard.kernels.planning.choice import kernels_of
from regard.kernels.planning.rates import predicted_seconds
from regard.kernels.planning.unit_prices import at_another_price, held_prices

from .kernel_choices import Choice

MATTERS = 0.02
"""A price matters for a kernel and a problem if twice the price changes the predicted time by this share."""
DOUBT = 0.3
"""How much weight a price keeps that has: as much as measurements which a share of this size of their time tells."""
LEAST, MOST = 0.1, 10.0
"""The fitted prices are at least and at most so many times those in use."""


@dataclass(frozen=True, slots=True)
class FittedPrice:
    """A price, as it is used and as it fits the measured times best, and on how many times that rests."""

    name: str
    used: float
    fitted: float
    measurements: int


def fitted_prices(choices: Sequence[Choice]) -> list[FittedPrice]:
    """The prices with which predicted times are nearest to the measured ones, each error as a share of its time.

    Σ_i ((t_i - p_i(1) - Σ_j (f_j - 1) Δ_ij) / t_i)² + DOUBT² Σ_j (f_j - 1)² is the least, where p_i is the predicted
    time of a kernel on a problem, and Δ_ij what it changes by if price j is doubled: predictions are sums of prices.
    """
    timed = [(kernel, posed, seconds) for choice in choices for kernel, posed, seconds in _timed(choice)]
    names = list(held_prices())
    if not timed:
        return [FittedPrice(name, held_prices()[name]["value"], held_prices()[name]["value"], 0) for name in names]
    seconds = np.array([spent for *_, spent in timed])
    predicted = _predicted(timed)
    changes = np.empty((len(timed), len(names)))
    for column, name in enumerate(names):
        with at_another_price(name, 2.0 * held_prices()[name]["value"]):
            changes[:, column] = (_predicted(timed) - predicted) / seconds
    rows = np.concatenate([changes, DOUBT * np.eye(len(names))])
    wanted = np.concatenate([(seconds - predicted) / seconds, np.zeros(len(names))])
    factors = np.clip(1.0 + np.linalg.lstsq(rows, wanted, rcond=None)[0], LEAST, MOST)
    counts = (np.abs(changes) * seconds[:, None] > MATTERS * predicted[:, None]).sum(0)
    return [
        FittedPrice(name, held_prices()[name]["value"], held_prices()[name]["value"] * float(factor), int(count))
        for name, factor, count in zip(names, factors, counts, strict=True)
    ]


def _timed(choice: Choice) -> list[tuple[Kernel, Problem, float]]:
    """The kernels that were timed on a problem, the problem as it was posed, and their seconds."""
    posed = explain(*choice.problem.tensors(), **choice.problem.options()).problem
    by_name = {kernel.name: kernel for kernel in kernels_of(posed)}
    return [(by_name[name], posed, seconds) for name, seconds in choice.measured.items()]


def _predicted(timed: Sequence[tuple[Kernel, Problem, float]]) -> np.ndarray:
    return np.array([predicted_seconds(kernel.cost(posed), posed) for kernel, posed, _ in timed])
