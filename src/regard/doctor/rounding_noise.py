"""The differences that rounding alone makes in the outputs of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .subject import Subject

SAFETY = 4.0
"""Rounding is measured on a few inputs; others may round this much worse."""


@dataclass(frozen=True)
class Noise:
    """What rounding changes in the outputs of a model.

    repeat: the same input twice. order: the rows of the batch in reverse order, 0 for a random model. precision:
    float32 instead of float64, the most of three inputs; where the model does not run in float64, or is random, its
    parameters changed by half a unit in the last place. unit: one unit in the last place of the largest output. seeds:
    the same input with another random seed.
    """

    repeat: float
    order: float
    precision: float
    unit: float
    seeds: float

    @property
    def is_random(self) -> bool:
        """Whether the outputs depend on the random seed."""
        return self.seeds > SAFETY * max(self.repeat, self.unit)

    @property
    def same_shape(self) -> float:
        """Largest difference that rounding makes between inputs of one shape."""
        return SAFETY * max(self.repeat, self.order, self.unit)

    @property
    def other_shape(self) -> float:
        """Largest difference that rounding makes between inputs of different shapes, or kernels."""
        return max(self.same_shape, SAFETY * self.precision)


def measure_noise(subject: Subject, original: Subject) -> Noise:
    """What rounding changes in the outputs of the subject; `original` is the model in its own dtype."""
    first = subject.outputs()
    unit = torch.finfo(first.dtype).eps * float(first.abs().nan_to_num().max())
    repeat = _finite(subject.outputs() - first)
    noise = Noise(repeat, 0.0, 0.0, unit, _finite(subject.outputs(seed=1) - first))

    def flip(value: Tensor) -> Tensor:
        return value.flip(0) if value.shape[:1] == (subject.batch_size,) else value

    order = 0.0
    if not noise.is_random:
        order = _finite(subject.with_tensors(flip).outputs().flip(0) - first)
    if first.dtype == torch.float64 and subject is not original and not noise.is_random:
        precision = max(_finite(original.outputs().double() - first), *_precisions(subject, original))
    else:
        precision = _finite(_nudged(subject).outputs() - first)
    return replace(noise, order=order, precision=precision)


def _precisions(subject: Subject, original: Subject) -> Iterator[float]:
    """What float32 changes of two more inputs: of one alone it can be a third of what it is of another."""
    for seed in (1, 2):
        other = original.others(original.sequence, seed)
        yield _finite(original.outputs(other).double() - subject.outputs(other.to(subject.sequence.dtype)))


def _finite(difference: Tensor) -> float:
    """Largest absolute number that is finite."""
    return float(difference.abs().nan_to_num(nan=0.0, posinf=0.0).max())


def _nudged(subject: Subject) -> Subject:
    """The subject with each parameter changed by half a unit in its last place, up or down."""
    other = subject.copied()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.model.parameters():
            if parameter.is_floating_point():
                sign = torch.randint(2, parameter.shape, generator=generator).to(parameter) - 0.5
                parameter.mul_(1 + torch.finfo(parameter.dtype).eps * 2 * sign)
    return other
