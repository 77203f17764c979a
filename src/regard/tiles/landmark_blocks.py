"""The blocks of landmark attention as native code reads them: whole ones in each tile of keys, or wider than a tile."""

from __future__ import annotations

from dataclasses import dataclass

from ..biases.landmarks import BlockWeights
from ..core.problem import Problem
from .row_spans import first_key_position, query_range
from .tile_bits import BLOCK


@dataclass(frozen=True, slots=True)
class LandmarkBlocks:
    """Blocks of `size` keys from the first key on. shift: the position of the first query, that of the key being 0."""

    size: int
    shift: int

    @classmethod
    def from_problem(cls, problem: Problem) -> LandmarkBlocks | None:
        """The blocks of a problem, where they are `BlockWeights.in_place`; None of any other."""
        bias = problem.bias
        if not isinstance(bias, BlockWeights) or not bias.in_place(problem):
            return None
        return cls(bias.size, query_range(problem).start - first_key_position(problem))

    @property
    def tile_width(self) -> int:
        """Columns of a tile: as many as are whole blocks, or BLOCK of a wider one."""
        return BLOCK if self.size > BLOCK else BLOCK // self.size * self.size
