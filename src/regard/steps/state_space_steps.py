"""A diagonal state space step by step: discretization, the state of each position, and the same as a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..linear import diagonal_state_space
from ..linear.diagonal_state_space import diagonal_state_space_with_state
from .hand_arithmetic import named_cell, product_example
from .step_table import StepTable, Walkthrough, make_table
from .table_formats import factor_text, number_text
from .walkthrough import TITLE

COMPLEX = ("Re", "Im")


@dataclass(frozen=True)
class StateSpaceChannel:
    """The parameters of a channel with one complex state: Δ, A, C and D, with the bilinear rule."""

    step: float
    rate: complex
    weight: complex
    skip: float

    @property
    def numbers(self) -> dict[str, complex]:
        """The parameters by their letter."""
        return {"Δ": self.step, "A": self.rate, "C": self.weight, "D": self.skip}

    @property
    def discrete(self) -> tuple[complex, complex]:
        """Ā = (1 + ΔA/2) / (1 - ΔA/2) and B̄ = Δ / (1 - ΔA/2)."""
        half = self.step * self.rate / 2
        return (1 + half) / (1 - half), self.step / (1 - half)

    def arguments(self, *, skips: bool = True) -> dict[str, Any]:
        """The parameters as `regard.linear.diagonal_state_space` takes them, in float64; without `skips` D is 0."""
        rate, weight = (torch.tensor([[number]], dtype=torch.complex128) for number in (self.rate, self.weight))
        step, skip = (torch.tensor([number], dtype=torch.float64) for number in (self.step, self.skip * skips))
        return {"step": step, "rates": rate, "weights": weight, "skip": skip, "discretization": "bilinear"}


def state_space_walkthrough(value: Tensor, channel: StateSpaceChannel) -> Walkthrough:
    """S4D of one channel with one state: Ā and B̄, the state after each position and y, then the kernel K and y again.

    States and outputs are those of `regard.linear.diagonal_state_space_with_state`, in float64, and K is what it makes
    of the input 1, 0, 0, ...

    Shapes: value (N, 1).
    """
    value = value.double()
    states = [0j]
    for row in value:
        before = torch.tensor([[states[-1]]], dtype=torch.complex128)
        _, after = diagonal_state_space_with_state(row[None], **channel.arguments(), state=before)
        states.append(complex(after.item()))
    tables = [
        make_table("input", value, [f"x{at + 1}" for at in range(len(value))]),
        make_table("channel_parameters", _pairs(*channel.numbers.values()), list(channel.numbers), COMPLEX),
        *_discrete_tables(channel),
        *_state_tables(value, channel, states),
        *_output_tables(value, channel, states[-1]),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _discrete_tables(channel: StateSpaceChannel) -> list[StepTable]:
    """Ā and B̄."""
    factor, written = channel.discrete
    half = channel.step * channel.rate / 2
    above, below = (complex_factor(number) for number in (1 + half, 1 - half))
    quotient = f"{above} / {below} = {complex_text(factor)}"
    other = f"{number_text(channel.step, 3)} / {below} = {complex_text(written)}"
    return [
        make_table("state_factor", _pairs(factor), ["Ā"], COMPLEX, example=quotient),
        make_table("input_factor", _pairs(written), ["B̄"], COMPLEX, example=other),
    ]


def _state_tables(value: Tensor, channel: StateSpaceChannel, states: Sequence[complex]) -> list[StepTable]:
    """The state after each position; states: that before the first position too."""
    factor, written = (complex_factor(number) for number in channel.discrete)
    tables = []
    for at, (before, after) in enumerate(pairwise(states)):
        terms = f"{factor} · {complex_factor(before)} + {written} · {factor_text(float(value[at]))}"
        tables.append(
            make_table(
                *(f"state.{at + 1}", _pairs(after), ["h"], COMPLEX),
                wording="complex_state",
                fill=str(at + 1),
                example=f"{terms} = {complex_text(after)}",
            )
        )
    return tables


def _output_tables(value: Tensor, channel: StateSpaceChannel, last: complex) -> list[StepTable]:
    """The outputs, the kernel, and the outputs by it; last: the state after the last position."""
    outputs = diagonal_state_space(value, **channel.arguments())
    impulse = torch.zeros_like(value)
    impulse[0] = 1.0
    kernel = diagonal_state_space(impulse, **channel.arguments(skips=False))
    names, distances = ([f"{letter}{at + one}" for at in range(len(value))] for letter, one in (("y", 1), ("K", 0)))
    weight, (factor, written) = complex_factor(channel.weight), map(complex_factor, channel.discrete)
    own = f"{factor_text(channel.skip)} · {factor_text(float(value[-1]))}"
    read = f"2 Re({weight} · {complex_factor(last)}) + {own} = {number_text(float(outputs[-1]), 3)}"
    power = f"2 Re({weight} · {factor} · {written}) = {number_text(float(kernel[1]), 3)}"
    factors = [*kernel.flip(0).flatten().tolist(), channel.skip]
    summed = product_example(torch.tensor(factors), torch.cat([value, value[-1:]])[:, 0], outputs[-1, 0])
    cell = len(value) - 1, 0
    return [
        make_table("outputs", outputs, names, example=named_cell(read, cell, names, ["1"])),
        make_table("kernel", kernel, distances, example=named_cell(power, (1, 0), distances, ["1"])),
        make_table("convolution", outputs, names, example=named_cell(summed, cell, names, ["1"])),
    ]


def complex_text(number: complex) -> str:
    """A complex number as it is written by hand.

    >>> [complex_text(number) for number in (0.5j, 4 + 2j, -1 - 0.5j, 3 + 0j)]
    ['0.500i', '4 + 2i', '-1 - 0.500i', '3']
    """
    real, imaginary = number_text(number.real, 3), number_text(abs(number.imag), 3)
    if imaginary == "0":
        return real
    sign = "-" if number.imag < 0 else "+"
    return f"{'-' if sign == '-' else ''}{imaginary}i" if real == "0" else f"{real} {sign} {imaginary}i"


def complex_factor(number: complex) -> str:
    """A complex number as a factor, in brackets where it is a sum or negative.

    >>> complex_factor(0.5j), complex_factor(4 + 2j)
    ('0.500i', '(4 + 2i)')
    """
    text = complex_text(number)
    return f"({text})" if " " in text or text.startswith("-") else text


def _pairs(*numbers: complex) -> Tensor:
    """Complex numbers as rows of a real and an imaginary part."""
    return torch.view_as_real(torch.tensor(numbers, dtype=torch.complex128))
