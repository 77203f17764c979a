"""Positions as hashable formulas: of residue classes and of selected positions, beside ranges and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class ResiduePositions:
    """first + c + step · i for the classes c in 0..classes-1 and i in 0..length-1: (classes, 1, ..., 1, length).

    leading: how many axes of size 1 stand between the two.

    >>> ResiduePositions(first=2, step=4, length=3, classes=2).tensor()
    tensor([[ 2,  6, 10],
            [ 3,  7, 11]])
    """

    first: int
    step: int
    length: int
    classes: int
    leading: int = 0

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """The positions, int64."""
        starts = torch.arange(self.first, self.first + self.classes, device=device)
        positions = starts[:, None] + self.step * torch.arange(self.length, device=device)
        return positions.view(self.classes, *[1] * self.leading, self.length)


class PositionSet(Protocol):
    """A set of positions, equal and hashable by its definition."""

    def contains(self, positions: Tensor) -> Tensor:
        """Whether each position is in the set: bool."""
        ...


@dataclass(frozen=True)
class SelectedPositions:
    """The positions of a range that are in a set, in rising order: (number,)."""

    chosen: PositionSet
    among: range

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """The positions, int64, from the first to the last."""
        return self.among.start + self.indices(device)

    def indices(self, device: torch.device | None = None) -> Tensor:
        """Where in the range they are, int64."""
        # Found on the CPU: how many there are is read.
        positions = torch.arange(self.among.start, self.among.stop, device="cpu")
        found = self.chosen.contains(positions).nonzero().flatten()
        return found if device is None else found.to(device, non_blocking=True)


@dataclass(frozen=True)
class BlockPositions:
    """Blocks of neighbouring positions: first + step · b + i for b in 0..blocks-1 and i in 0..height-1.

    >>> BlockPositions(first=4, step=10, blocks=2, height=3).tensor()
    tensor([ 4,  5,  6, 14, 15, 16])
    """

    first: int
    step: int
    blocks: int
    height: int

    def tensor(self, device: torch.device | None = None) -> Tensor:
        """The positions, int64."""
        starts = self.first + self.step * torch.arange(self.blocks, device=device)
        return (starts[:, None] + torch.arange(self.height, device=device)).flatten()


Positions: TypeAlias = Tensor | range | ResiduePositions | SelectedPositions | BlockPositions


def positions_tensor(positions: Positions, device: torch.device | None) -> Tensor:
    """Positions as a tensor, int64 unless they are one already."""
    if isinstance(positions, Tensor):
        return positions
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    return positions.tensor(device)
