"""TUPE: products of positions beside those of content, with maps of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.finite import waits
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from .all_pairs import AllPairs, scaled_product, score_scale
from .base import Bias, describe_tensor, is_floating


@dataclass(frozen=True, eq=False, repr=False)
class PositionProducts(Bias, AllPairs):
    """scale · queries[i] · keys[j] of the positions i and j; of the first position numbers of its own; see `tupe`."""

    queries: Tensor
    keys: Tensor
    from_first: Tensor | None = None
    to_first: Tensor | None = None
    scale: float | None = None

    def bound(self, problem: Problem) -> Bias:
        if not isinstance(problem.pairs, DotPairs):
            raise ConfigurationError(
                f"{self!r} has the scale of a dot product, and the score of this call is none: leave score out, or use "
                "scores.Dot, ScaledDot or General"
            )
        return replace(self, scale=problem.pairs.scale)

    def values(self, grid: Grid) -> Tensor:
        scale = self.queries.shape[-1] ** -0.5 if self.scale is None else self.scale
        query, key = (
            self._at(name, table, positions)
            for name, table, positions in (
                ("queries", self.queries, grid.query_positions[..., grid.rows]),
                ("keys", self.keys, grid.key_positions[..., grid.columns]),
            )
        )
        values = scale * query @ key.mT
        for number, at_first in ((self.to_first, grid.key == 0), (self.from_first, grid.query == 0)):
            if number is not None:
                at_first = at_first if at_first.ndim == 2 or grid.heads else at_first.unsqueeze(-3)
                values = torch.where(at_first, at_least_float32(number)[:, None, None], values)
        return values if grid.heads or values.shape[-3] != 1 else values.squeeze(-3)

    def _at(self, name: str, table: Tensor, positions: Tensor) -> Tensor:
        """The vectors of positions, (..., H, m, D); under a transform, and off the CPU, torch refuses those beyond.

        Positions below 0, as padding on the left has, stand for 0: a mask hides them.
        """
        if positions.numel() and not (under_transform() or waits(positions)):
            last, count = int(positions.max()), table.shape[1]
            if last >= count:
                raise ConfigurationError(
                    f"{self!r} has {count} vectors as {name}, one for each position from 0, and {name} of this call "
                    f"sit at positions up to {last}: it needs {last + 1}. Pass longer {name}, or a shorter sequence"
                )
        return at_least_float32(table)[:, positions.long().clamp(min=0)].movedim(0, -3)

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        keys, first = problem.keys, problem.keys - problem.queries
        query, key = self.queries.float(), self.keys.float()
        query = query if query.shape[1] == problem.queries else query[:, first:keys]
        key = key if key.shape[1] == keys else key[:, :keys]
        values = scaled_product(query, key.mT, score_scale(problem))
        if self.to_first is None and self.from_first is None:
            return values
        heads = max(each.shape[0] for each in (self.to_first, self.from_first) if each is not None)
        if values.shape[0] < heads:
            values = values.expand(heads, -1, -1).clone()
        if self.to_first is not None:
            values.select(2, 0).copy_(self.to_first.unsqueeze(1))
        if self.from_first is not None:  # of a later first query no number is: its gradient is 0
            values.narrow(1, 0, max(1 - first, 0)).copy_(self.from_first.view(-1, 1, 1))
        return values

    def __repr__(self) -> str:
        return f"tupe({describe_tensor(self.queries)}, {describe_tensor(self.keys)})"


def tupe(queries: Tensor, keys: Tensor, *, from_first: Tensor | None = None, to_first: Tensor | None = None) -> Bias:
    """Scale · a_i · b_j: products of the positions i and j, whose maps are not those of the words.

    queries a = P U_Q and keys b = P U_K are projections of the position embeddings. The scale is that of the scores;
    the paper has 1/√(2D) for both: pass it as `scale` of the call. Add `relative(table)` for TUPE-R.

    from_first, to_first: numbers in place of the products where the query, or else the key, is at position 0, the
    symbol of the whole sentence, which has no place in it ("untied").

    Shapes: queries and keys (heads or 1, positions, D); from_first and to_first (heads,). Gradients flow into all.

    Raises:
        DtypeError, ShapeError: tensors that are not as above.
        ConfigurationError: an additive score; positions that the tables do not have.

    Source: Ke et al. 2021 (arXiv 2006.15595), Eq. 7 to 10.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> table = torch.tensor([[[1.0], [2.0], [3.0]]])
    >>> biases.tupe(table, table, to_first=torch.zeros(1)).values(Grid.from_lengths(2, 3))
    tensor([[[0., 4., 6.],
             [0., 6., 9.]]])
    """
    for name, tensor, axes in (
        ("queries", queries, 3),
        ("keys", keys, 3),
        ("from_first", from_first, 1),
        ("to_first", to_first, 1),
    ):
        if tensor is None:
            continue
        if not is_floating(tensor):
            has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise DtypeError(f"tupe needs floating-point {name}; this is {has}")
        if tensor.ndim != axes:
            wanted = "(heads, positions, D)" if axes == 3 else "(heads,)"
            raise ShapeError(f"tupe needs {name} {wanted}; this has the shape {tuple(tensor.shape)}")
    if queries.shape[-1] != keys.shape[-1]:
        raise ShapeError(
            f"tupe needs queries and keys of one D; they have {queries.shape[-1]} and {keys.shape[-1]} features"
        )
    return PositionProducts(queries, keys, from_first, to_first)
