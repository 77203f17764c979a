"""Rotary positions along several axes, as of time, height and width: which pair of features turns by which axis."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .frequencies import geometric, is_whole


class RotarySections(ABC):
    """Which axis of the positions each of dim/2 pairs of features turns by, and with which frequency."""

    @property
    @abstractmethod
    def axes(self) -> int:
        """The number of axes."""

    @abstractmethod
    def axis_of_pairs(self, pairs: int) -> list[int]:
        """The axis of each pair.

        Raises:
            ConfigurationError: the sections are not of so many pairs.
        """

    def frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        """The frequency of each pair, (dim/2,), in radians per position of its axis."""
        return geometric(dim, base, device)


def _check_sizes(owner: str, sizes: Sequence[int], pairs: int) -> None:
    if sum(sizes) != pairs:
        raise ConfigurationError(
            f"{owner}({tuple(sizes)}) is of {sum(sizes)} pairs of features, but Rotary turns {pairs}: the sizes need "
            "to add up to dim / 2"
        )


def _checked(owner: str, sizes: object) -> tuple[int, ...]:
    if not isinstance(sizes, tuple | list) or not sizes or not all(is_whole(size) and size >= 1 for size in sizes):
        raise ConfigurationError(
            f"{owner} needs a number of pairs for each axis, such as (16, 24, 24); it is {sizes!r}"
        )
    return tuple(sizes)


@dataclass(frozen=True)
class Sections(RotarySections):
    """Neighbouring pairs for each axis: the first `sizes[0]` turn by axis 0, the next `sizes[1]` by axis 1, and so on.

    Source: M-RoPE of Wang et al. 2024, Qwen2-VL (arXiv 2409.12191), section 2.1: time, height and width, sizes
    (16, 24, 24); Qwen2.5-VL's is the same (`mrope_section`).

    >>> Sections((1, 2, 1)).axis_of_pairs(4)
    [0, 1, 1, 2]
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _checked("Sections", self.sizes))

    @property
    def axes(self) -> int:
        return len(self.sizes)

    def axis_of_pairs(self, pairs: int) -> list[int]:
        _check_sizes("Sections", self.sizes, pairs)
        return [axis for axis, size in enumerate(self.sizes) for _ in range(size)]


@dataclass(frozen=True)
class InterleavedSections(RotarySections):
    """Axes in turn, so that each has high and low frequencies: pair i turns by axis i modulo the number of axes.

    An axis after the first has the first `sizes[axis]` of its pairs; all that are left turn by axis 0.

    Source: interleaved M-RoPE of Qwen3-VL (arXiv 2511.21631), sizes (24, 20, 20) (`mrope_section` with
    `mrope_interleaved`).

    >>> InterleavedSections((4, 2, 2)).axis_of_pairs(8)
    [0, 1, 2, 0, 1, 2, 0, 0]
    """

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _checked("InterleavedSections", self.sizes))

    @property
    def axes(self) -> int:
        return len(self.sizes)

    def axis_of_pairs(self, pairs: int) -> list[int]:
        _check_sizes("InterleavedSections", self.sizes, pairs)
        if any(axis + (size - 1) * self.axes >= pairs for axis, size in enumerate(self.sizes) if axis):
            raise ConfigurationError(
                f"InterleavedSections({self.sizes}) needs more pairs of an axis after the first than it gets in turn: "
                f"of {pairs} pairs at most {-(-pairs // self.axes)} for each of {self.axes} axes"
            )
        return [pair % self.axes if pair // self.axes < self.sizes[pair % self.axes] else 0 for pair in range(pairs)]


@dataclass(frozen=True)
class Axial(RotarySections):
    """The features in as many equal parts as there are axes, each a rotary embedding of its own along one axis.

    All axes have the same frequencies, base^(-2i · axes/dim): a patch of a picture at (row, column), with count=2.

    Source: 2-D rotary positions as in Qwen2-VL's vision encoder (arXiv 2409.12191, section 2.1); Heo et al. 2024
    (arXiv 2403.13298), axial frequencies.

    >>> Axial(2).axis_of_pairs(4), Axial(2).frequencies(8, 100.0, torch.device("cpu")).tolist()
    ([0, 0, 1, 1], [1.0, 0.1, 1.0, 0.1])
    """

    count: int = 2

    def __post_init__(self) -> None:
        if not is_whole(self.count) or self.count < 1:
            raise ConfigurationError(f"Axial needs a number of axes from 1 on; it is {self.count!r}")

    @property
    def axes(self) -> int:
        return self.count

    def axis_of_pairs(self, pairs: int) -> list[int]:
        if pairs % self.count:
            raise ConfigurationError(
                f"Axial({self.count}) needs a dim of Rotary that {2 * self.count} divides; it is {2 * pairs}"
            )
        return [axis for axis in range(self.count) for _ in range(pairs // self.count)]

    def frequencies(self, dim: int, base: float, device: torch.device) -> Tensor:
        return geometric(dim // self.count, base, device).repeat(self.count)
