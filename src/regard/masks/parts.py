"""The dense parts that a sparse mask falls into: rows of one residue, few columns, few rows.

In a strided mask the positions of one residue see one another and no others: taken by themselves, they are dense
blocks. Summary columns and global tokens are few: gathered, they are dense as well. A mask that is made of such parts
lists them as symbols in `Mask.parts`; kernels compute each part as a problem of its own and merge the results by their
log-sum-exps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.symbolic_positions import PositionSet
from ..errors import MaskError

if TYPE_CHECKING:
    from .base import Mask


@dataclass(frozen=True)
class PeriodicPositions:
    """position mod period >= start.

    >>> PeriodicPositions(4, 3).contains(torch.arange(9)).nonzero().flatten()
    tensor([3, 7])
    """

    period: int
    start: int

    def contains(self, positions: Tensor) -> Tensor:
        return positions % self.period >= self.start

    def __str__(self) -> str:
        return f"positions mod {self.period} >= {self.start}"


@dataclass(frozen=True)
class ListedPositions:
    """The positions in `indices`.

    >>> ListedPositions((0, 5)).contains(torch.arange(3))
    tensor([ True, False, False])
    """

    indices: tuple[int, ...]

    def contains(self, positions: Tensor) -> Tensor:
        numbers = torch.tensor(self.indices, dtype=torch.int64, device=positions.device)
        if torch.compiler.is_compiling():  # of `isin` many graphs have no operator
            return (positions.unsqueeze(-1) == numbers).any(-1)
        return torch.isin(positions, numbers)

    def __str__(self) -> str:
        return f"{len(self.indices)} positions"


@dataclass(frozen=True)
class Part:
    """Pairs of a mask that are dense once rows and columns are selected by their positions.

    A pair (query position q, key position k) is in the part if q ≡ k mod `step`, q is in `rows`, k is in `columns`, and
    it exists in `mask`. None stands for no condition. The parts of a mask are disjoint, and their union is the mask.

    Raises:
        MaskError: a step below 1, or a step above 1 beside rows or columns.
    """

    mask: Mask | None
    step: int = 1
    rows: PositionSet | None = None
    columns: PositionSet | None = None

    def __post_init__(self) -> None:
        if self.step < 1 or (self.step > 1 and (self.rows is not None or self.columns is not None)):
            raise MaskError(
                f"a part has step={self.step}, rows={self.rows} and columns={self.columns}; it needs a step of at "
                "least 1, and above 1 neither rows nor columns: put these conditions into its mask"
            )

    @property
    def is_selection(self) -> bool:
        """Whether rows or columns are selected or reordered; otherwise the part is just another mask."""
        return self.step > 1 or self.rows is not None or self.columns is not None

    def restrict(self, mask: Mask) -> Part:
        """The pairs of this part that exist in another mask too."""
        return Part(mask if self.mask is None else mask & self.mask, self.step, self.rows, self.columns)

    def __str__(self) -> str:
        conditions = [f"residues mod {self.step}"] if self.step > 1 else []
        sets = {"rows": self.rows, "columns": self.columns}
        conditions += [f"{name} at {chosen}" for name, chosen in sets.items() if chosen is not None]
        return " of ".join([*conditions, "all pairs" if self.mask is None else repr(self.mask)])


def intersect_parts(left: Mask, right: Mask) -> tuple[Part, ...]:
    """The parts of left & right; of two masks with parts, the right one only restricts those of the left one."""
    if left.parts:
        return tuple(part.restrict(right) for part in left.parts)
    return tuple(part.restrict(left) for part in right.parts)


def unite_parts(left: Mask, right: Mask) -> tuple[Part, ...]:
    """The parts of left | right, disjoint: what is a plain mask in either comes first and is left out of the others."""
    if not left.parts and not right.parts:
        return ()
    (plain_left, selections_left), (plain_right, selections_right) = _split(left), _split(right)
    plain = [*plain_left, *plain_right]
    parts = [Part(reduce(or_, plain))] if plain else []
    parts += [part.restrict(~reduce(or_, plain_right)) if plain_right else part for part in selections_left]
    parts += [part.restrict(~left) for part in selections_right]
    return tuple(parts)


def _split(mask: Mask) -> tuple[list[Mask], list[Part]]:
    """The masks of the parts that select nothing, and the other parts."""
    parts = mask.parts or (Part(mask),)
    plain = [part.mask for part in parts if not part.is_selection and part.mask is not None]
    return plain, [part for part in parts if part.is_selection]
