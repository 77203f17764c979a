"""The claims of `Mask.parts`, held against the pairs of the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.grid import Grid
from ..masks import Mask
from ..masks.parts import Part


def assert_parts(mask: Mask, queries: range, keys: range) -> None:
    """Check that the parts that a mask lists are disjoint, and that their union is the mask, pair by pair.

    queries, keys: the positions of both. A mask that lists no parts passes.

    Raises:
        AssertionError: a pair of the mask is in none or in several of its parts, or a part has a pair that the mask
            does not have.

    >>> from regard import masks
    >>> assert_parts(masks.strided(3) | masks.window(1, 1), range(8), range(8))
    """
    if not mask.parts:
        return
    grid = Grid.from_lengths(len(queries), len(keys), query_positions=queries, key_positions=keys)
    counts = torch.stack([_pairs(part, grid) for part in mask.parts]).sum(0)
    kept = mask.evaluate(grid).expand(counts.shape)
    wrong = (counts != kept.long()).nonzero()
    if len(wrong):
        *leading, row, column = wrong[0].tolist()
        at = (*leading, row, column)
        has = "is in the mask" if kept[at] else "is not in the mask"
        raise AssertionError(
            f"{mask!r}: the pair of query position {queries[row]} and key position {keys[column]} {has}, and in "
            f"{int(counts[at])} of its parts ({'; '.join(map(str, mask.parts))}): `parts` needs to list each pair of "
            "the mask once, and no other"
        )


def _pairs(part: Part, grid: Grid) -> Tensor:
    """1 where a pair of the grid is in the part, 0 elsewhere."""
    exists = (grid.query - grid.key) % part.step == 0
    if part.rows is not None:
        exists = exists & grid.by_query(part.rows.contains)
    if part.columns is not None:
        exists = exists & grid.by_key(part.columns.contains)
    return (exists if part.mask is None else exists & part.mask.evaluate(grid)).long()
