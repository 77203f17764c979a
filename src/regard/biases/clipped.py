"""Learned tables over clipped distances."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..errors import ConfigurationError, ShapeError
from .base import described
from .distances import RelativeBias, looked_up, table_of


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(RelativeBias):
    """table[head, clip(key position - query position, -before, after) + before]."""

    table: Tensor
    before: int
    after: int

    def along(self, distances: Tensor) -> Tensor:
        return looked_up(self.table, distances.clamp(-self.before, self.after) + self.before)

    def __repr__(self) -> str:
        return f"clipped({described(self.table)}, before={self.before}, after={self.after})"


def clipped(table: Tensor, *, before: int, after: int) -> RelativeBias:
    """table[head, clip(key position - query position, -before, after) + before]: a learned number a head and distance.

    Column 0 of the table serves keys `before` and more positions before the query, column `before` the query's own
    position, the last one keys `after` and more positions after it. Units: positions, both ends included.

    Shapes: table (heads, before + 1 + after); gradients flow into it.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, before + 1 + after).
        ConfigurationError: before or after is negative.

    Source: Shaw et al. 2018 (arXiv 1803.02155), section 3.2, with before = after = k. There the table holds vectors,
    which are added to the keys (and others to the values), so that the score gets query · vector; here it holds
    numbers that are added to the score and do not ask the query.

    >>> import torch
    >>> from regard import biases
    >>> from regard.tiles import Grid
    >>> biases.clipped(torch.arange(4.0)[None], before=2, after=1).values(Grid.of(4, 4))
    tensor([[[2., 3., 3., 3.],
             [1., 2., 3., 3.],
             [0., 1., 2., 3.],
             [0., 0., 1., 2.]]])
    """
    if before < 0 or after < 0:
        raise ConfigurationError(f"clipped needs distances of at least 0; before is {before} and after is {after}")
    table = table_of(table, "clipped", "before + 1 + after")
    if table.shape[-1] != before + 1 + after:
        raise ShapeError(
            f"clipped(before={before}, after={after}) needs a table with {before + 1 + after} columns, one for each "
            f"distance from {-before} to {after}; this one has the shape {tuple(table.shape)}"
        )
    return Clipped(table, before, after)
