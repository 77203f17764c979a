"""The second pass: the weights of a problem, computed again tile by tile from its log-sum-exp, for lenses to look at.

The weights of a tile are exp(scores - lse) (Dao et al. 2022, arXiv 2205.14135, section 3.1, does so backward). One pass
serves all lenses, over the tiles that the mask leaves, of all heads at once. It takes the products of queries and keys
once more, half of what the forward pass multiplies, and one exponential a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError
from .kernels.biasing import biasing
from .kernels.flat import Flat
from .kernels.layout import cut
from .kernels.scoring import LOG2_E, scoring
from .kernels.tilewise import LEAST, batches_at_once, tile_size
from .kernels.tiling import parts
from .lenses import Lens, Look, Tile
from .pairs import DotPairs, at_least_float32
from .problem import Problem
from .transforms import transformed

TILE = 2**19
"""Weights in a tile, over all batches and heads: more of them would leave the processor's caches."""
FAR = 1e30
"""What stands for infinity in a logarithm of base 2: its power is 0, and 0 times it is 0, not NaN."""


def started(problem: Problem, lenses: Iterable[Lens]) -> dict[Lens, Look[Any]]:
    """Each lens at work on the problem; equal lenses are one.

    Raises:
        ConfigurationError: something else than a lens; and what each lens says of a problem that does not fit.
    """
    looks: dict[Lens, Look[Any]] = {}
    for lens in lenses:
        if isinstance(lens, type) or not isinstance(lens, Lens):
            raise ConfigurationError(f"observe needs lenses from regard.lenses, such as Entropy(); one is {lens!r}")
        if lens not in looks:
            looks[lens] = lens.start(problem)
    return looks


def sweep(problem: Problem, lse: Tensor, looks: Iterable[Look[Any]]) -> None:
    """Give looks the tiles of a problem without NaN: each that the mask leaves, once, row by row from left to right.

    Raises:
        ConfigurationError: under torch.compile or torch.func.
    """
    looks = [look for look in looks if look.tiles]
    if not looks:
        return
    if transformed():
        raise ConfigurationError(
            "of all lenses only Weights can be looked through under torch.compile and torch.func: call observe outside"
        )
    terms = any(look.terms for look in looks)
    with torch.no_grad(), torch.autocast(problem.value.device.type, enabled=False):
        for tile in _tiles(problem, lse, terms=terms):
            for look in looks:
                look.add(tile)


def _tiles(problem: Problem, lse: Tensor, *, terms: bool) -> Iterator[Tile]:
    """The tiles one after another, in memory that the next one takes over."""
    flat, size = Flat.of(problem), tile_size(problem, TILE)
    batches, heads, queries, _ = flat.shape
    # A row that attends to nothing, or to NaN, has weights 0.
    lse = lse.reshape(batches, heads, queries, 1)
    lse = torch.where(lse.isfinite(), lse, FAR)
    for part in parts(problem, (size[0], LEAST), 1):
        for batch in cut(part.batch, batches_at_once(problem, TILE)):
            logs = _logs(flat.part(batch), lse[batch])
            spare = None
            for row in part.layout.rows:
                for run in row.runs:
                    for columns in cut(run.columns, size[1]):
                        exponents = logs.tile(row.rows, columns, masked=run.masked)
                        if not terms:
                            yield Tile(exponents.exp2_(), None, batch, row.rows, columns)
                            continue
                        spare = _room(spare, exponents, exponents.numel())
                        weights = torch.exp2(exponents, out=spare[: exponents.numel()].view_as(exponents))
                        yield Tile(weights, exponents.mul_(weights), batch, row.rows, columns)


def _logs(flat: Flat, lse: Tensor) -> _Logs | _ProductLogs:
    """How the logarithms of a problem's weights are made: in one product where there is nothing else to them."""
    problem = flat.problem
    if isinstance(flat.pairs, DotPairs) and problem.softcap is None and problem.bias is None:
        return _ProductLogs(flat, flat.pairs, lse)
    return _Logs(flat, lse)


class _ProductLogs:
    """log₂ w = q · k · scale · log₂ e - lse · log₂ e, with the difference in the product, in memory that is kept."""

    def __init__(self, flat: Flat, pairs: DotPairs, lse: Tensor) -> None:
        self.flat, self.query, self.factor = flat, pairs.query, pairs.scale * LOG2_E
        self.key = at_least_float32(pairs.key).flatten(0, 1)  # [b·Hk, N, D]
        self.lse = lse * -LOG2_E
        self.room: Tensor | None = None
        self._row: tuple[slice, Tensor, Tensor] | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """(b, H, m, n), to be written into."""
        query, offset = self._of(rows)
        key = self.key[:, columns]
        sizes = torch.Size((*query.shape[:2], key.shape[1]))
        self.room = _room(self.room, query, sizes.numel())
        product = torch.baddbmm(offset, query, key.mT, out=self.room[: sizes.numel()].view(sizes))
        tile = product.view(*self.query.shape[:2], rows.stop - rows.start, sizes[2])
        if masked and (keep := self.flat.keep(rows, columns)) is not None:
            tile.add_(torch.zeros(keep.shape, dtype=tile.dtype, device=tile.device).masked_fill_(~keep, -FAR))
        return tile

    def _of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Query rows times the factor and offsets, (b·Hk, group·m, D or 1): heads that share a key become its rows."""
        if self._row is None or self._row[0] != rows:
            query = at_least_float32(self.query[:, :, rows]) * self.factor
            query, offset = (of.reshape(len(self.key), -1, of.shape[-1]) for of in (query, self.lse[:, :, rows]))
            self._row = rows, query, offset
        return self._row[1:]


class _Logs:
    """log₂ w = (softcap(f(q, k)) + bias - lse) · log₂ e, one step after another."""

    def __init__(self, flat: Flat, lse: Tensor) -> None:
        self.flat, self.lse = flat, lse
        self.scoring, self.biasing, self.softcap = scoring(flat.pairs), biasing(flat), flat.problem.softcap

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """(b, H, m, n), to be written into."""
        scores = self.scoring.scores(rows, columns)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.biasing is not None:
            scores.add_(self.biasing.values(rows, columns))
        scores.sub_(self.lse[:, :, rows])
        if masked and (keep := self.flat.keep(rows, columns)) is not None:
            scores.add_(torch.zeros(keep.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~keep, -FAR))
        # A bias may be -inf, or so far below 0 that this makes it so.
        return scores.mul_(LOG2_E).clamp_(min=-2 * FAR)


def _room(room: Tensor | None, like: Tensor, numbers: int) -> Tensor:
    """Memory for so many numbers at least, the same as before where that is enough."""
    return like.new_empty(numbers) if room is None or room.numel() < numbers else room
