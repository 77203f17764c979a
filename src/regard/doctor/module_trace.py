"""Traces of all modules in a run, and the first module in which two runs differ where they must not."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .examination_report import Place
from .subject import CACHES, Subject, hooks, largest, output_tensor


@dataclass
class ModuleCall:
    """One call of a module: its name, how many calls of it came before, its arguments and output tensor."""

    name: str
    number: int
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Tensor | None

    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        values = [*self.arguments, *self.keywords.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def again(self, subject: Subject, change: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The output for changed hidden inputs, (batch, length, ...), without the cache of the first call.

        None where the module does not run again, with a state of its own.
        """

        def changed(value: Any) -> Any:
            is_hidden = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2
            return change(value) if is_hidden and value.shape[:2] == subject.sequence.shape[:2] else value

        keywords = {name: None if name in CACHES else changed(value) for name, value in self.keywords.items()}
        try:
            with torch.no_grad():
                return output_tensor(self.module(*map(changed, self.arguments), **keywords))
        except Exception:
            return None

    def place(self) -> Place:
        """The module and the lines of its `forward`."""
        forward = type(self.module).forward
        try:
            return Place(self.name, inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1])
        except (OSError, TypeError):
            return Place(self.name, None, None)


def trace(subject: Subject, sequence: Tensor | None = None, **changes: Any) -> list[ModuleCall]:
    """All calls of modules in one run, in the order in which they end."""
    calls: list[ModuleCall] = []
    counts: Counter[str] = Counter()

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    def after(name: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        named = {key: copied(value) for key, value in keywords.items()}
        unnamed = tuple(map(copied, arguments))
        calls.append(ModuleCall(name, counts[name], module, unnamed, named, copied(output_tensor(output))))
        counts[name] += 1

    with hooks(subject.model, after):
        subject.run(sequence, **changes)
    return calls


def length_axis(tensor: Tensor, subject: Subject) -> int | None:
    """The axis of a tensor that the positions of the sequence are on; None where there is none."""
    for axis in (1, 2, 0):
        if tensor.ndim > max(axis, 1) and tensor.shape[axis] == subject.length:
            return axis
    return None


Part = Callable[[Tensor], Tensor | None]
"""The part of a tensor that two runs must agree in; None of a tensor that has none."""


def at_positions(subject: Subject, positions: slice) -> Part:
    """What tensors have at these positions of the sequence."""

    def part(tensor: Tensor) -> Tensor | None:
        axis = length_axis(tensor, subject)
        return None if axis is None else tensor[(slice(None),) * axis + (positions,)]

    return part


def first_moved_by(
    subject: Subject, sequences: tuple[Tensor | None, Tensor | None], part: Part, tolerance: float, **changes: Any
) -> Place | None:
    """The place of what `first_moved` finds in the runs of two sequences; None for that of the subject."""
    first, second = (trace(subject, sequence, **changes) for sequence in sequences)
    call = first_moved(first, second, part, tolerance)
    return None if call is None else call.place()


def first_moved(first: list[ModuleCall], second: list[ModuleCall], part: Part, tolerance: float) -> ModuleCall | None:
    """The first module whose inputs are the same in this part in both runs, and whose output is not."""

    def moved(one: Tensor | None, two: Tensor | None) -> bool:
        if one is None or two is None or one.shape != two.shape or not one.is_floating_point():
            return False
        before, after = part(one), part(two)
        return before is not None and after is not None and largest(torch.nan_to_num(after - before)) > tolerance

    others = {(call.name, call.number): call for call in second}
    for call in first:
        other = others.get((call.name, call.number))
        if other is None or not moved(call.output, other.output):
            continue
        if not any(map(moved, call.inputs(), other.inputs())):
            return call
    return None
