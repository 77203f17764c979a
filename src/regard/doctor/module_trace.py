"""Traces of all modules in a run, and the first module in which two runs differ at positions where they must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .subject import CACHES, Subject, largest, output_tensor, place_of


@dataclass
class ModuleCall:
    """One call of a module, in the order in which calls end: its name, arguments and output tensor."""

    name: str
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Tensor | None

    def inputs(self) -> list[Tensor]:
        """The floating-point and token tensors among the arguments."""
        values = [*self.arguments, *self.keywords.values()]
        return [value for value in values if isinstance(value, Tensor)]

    def again(self, change: Callable[[Any], Any]) -> Any:
        """What the module returns for changed arguments, without the cache of the first call."""
        keywords = {name: None if name in CACHES else change(value) for name, value in self.keywords.items()}
        with torch.no_grad():
            return self.module(*map(change, self.arguments), **keywords)

    def place(self) -> dict[str, Any]:
        """Module, file and line, as evidence takes them."""
        file, line = place_of(self.module)
        return {"module": self.name, "file": file, "line": line}


def trace(subject: Subject, sequence: Tensor | None = None, **changes: Any) -> list[ModuleCall]:
    """All calls of modules in one run, in the order in which they end."""
    calls: list[ModuleCall] = []
    names = {module: name for name, module in subject.model.named_modules()}

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        found = output_tensor(output)
        copied = tuple(one.clone() if isinstance(one, Tensor) else one for one in arguments)
        named = {name: one.clone() if isinstance(one, Tensor) else one for name, one in keywords.items()}
        calls.append(ModuleCall(names[module], module, copied, named, None if found is None else found.clone()))

    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in names]
    try:
        subject.run(sequence, **changes)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def length_axis(tensor: Tensor, subject: Subject) -> int | None:
    """The axis of a tensor that the positions of the sequence are on; None where there is none."""
    for axis in (1, 2, 0):
        if tensor.ndim > max(axis, 1) and tensor.shape[axis] == subject.length:
            return axis
    return None


def _moved(first: Tensor, second: Tensor, subject: Subject, positions: slice, tolerance: float) -> bool:
    if first.shape != second.shape or not first.is_floating_point():
        return False
    axis = length_axis(first, subject)
    if axis is None:
        return False
    index = (slice(None),) * axis + (positions,)
    return largest(torch.nan_to_num(second[index] - first[index])) > tolerance


def first_moved_by(
    subject: Subject, sequences: tuple[Tensor | None, Tensor | None], positions: slice, tolerance: float, **changes: Any
) -> ModuleCall | None:
    """As `first_moved`, of the runs of two sequences; None for that of the subject."""
    first, second = (trace(subject, sequence, **changes) for sequence in sequences)
    return first_moved(subject, first, second, positions, tolerance)


def first_moved(
    subject: Subject, first: list[ModuleCall], second: list[ModuleCall], positions: slice, tolerance: float
) -> ModuleCall | None:
    """The first module whose inputs at these positions are the same in both runs, and whose output is not."""
    seen: Counter[str] = Counter()
    by_name: dict[tuple[str, int], ModuleCall] = {}
    for call in second:
        by_name[call.name, seen[call.name]] = call
        seen[call.name] += 1
    seen.clear()
    for call in first:
        other = by_name.get((call.name, seen[call.name]))
        seen[call.name] += 1
        if other is None or call.output is None or other.output is None:
            continue
        inputs = zip(call.inputs(), other.inputs(), strict=False)
        if any(_moved(one, two, subject, positions, tolerance) for one, two in inputs):
            continue
        if _moved(call.output, other.output, subject, positions, tolerance):
            return call
    return None
