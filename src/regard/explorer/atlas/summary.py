"""One pass over all weights of a call for its summary: pooled pyramid, profiles and metrics, as named arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...lenses.base import WeightsLayout, WeightTile, select_batches
from .pyramid import PyramidLevels, UnmaskedCells, packed, pyramid

NEAR = 8
"""The largest distance of a key that counts as local, in positions."""
AT_ONCE = 64
"""Rows or columns that are reduced together in one step."""


@dataclass(frozen=True, eq=False)
class SummaryValues:
    """Results of a pass: finest cells (B, H, R, C), values per row (B, H, M) and per key (B, H, N).

    broken: which rows attend to NaN. mass: what each row gives in all, 0 where it is broken.
    entropy: in nats. top: its largest weight. reach: its mean distance, in positions.
    received: what each key is given. near: Σ of weights (B, H, 4), within NEAR positions, and at distance 0, 1 and -1.
    """

    largest: Tensor
    sums: Tensor
    broken: Tensor
    mass: Tensor
    entropy: Tensor
    top: Tensor
    reach: Tensor
    received: Tensor
    near: Tensor

    def of_shares(self) -> SummaryValues:
        """The same with the entropy of each row's weights divided by their sum, for rows that do not sum to 1."""
        mass = torch.where(self.mass > 0, self.mass, 1.0)
        return replace(self, entropy=(self.entropy / mass + mass.log()).clamp(min=0.0))


class SummaryAccumulator:
    """Accumulates `SummaryValues` from weight tiles; positions are (B or 1, M) and (B or 1, N)."""

    needs_entropy_terms = True

    def __init__(self, layout: WeightsLayout, levels: PyramidLevels, positions: tuple[Tensor, Tensor]) -> None:
        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(layout.batch, layout.heads, *sizes, dtype=layout.dtype, device=layout.device)

        self.levels, (self.queries, self.keys) = levels, positions
        self.largest, self.sums = zeros(*levels.shapes[0]), zeros(*levels.shapes[0])
        self.rows = zeros(4, layout.queries)  # mass, moment, Σ w log₂ w, largest
        self.received, self.near = zeros(layout.keys), zeros(4)

    def add(self, tile: WeightTile) -> None:
        """Add a tile of weights."""
        weights, batch, rows, columns = tile.weights, tile.batch, tile.rows, tile.columns
        queries, keys = select_batches(self.queries, batch)[:, rows], select_batches(self.keys, batch)[:, columns]
        mass, moment = _reach(weights, queries, keys)
        of_rows = self.rows[batch, :, :, rows]
        of_rows[:, :, 0] += mass
        of_rows[:, :, 1] += moment
        if tile.entropy_terms is not None:
            of_rows[:, :, 2] += tile.entropy_terms.sum(-1)
        torch.maximum(of_rows[:, :, 3], weights.amax(-1), out=of_rows[:, :, 3])
        # Over rows first, where numbers lie side by side; what is left is small.
        above = rows.start, self.levels.rows
        sums, largest = (_grouped(weights, -2, *above, of) for of in ("sum", "amax"))
        self.received[batch, :, columns] += sums.sum(-2)
        beside = columns.start, self.levels.columns
        sums, largest = _grouped(sums, -1, *beside, "sum"), _grouped(largest, -1, *beside, "amax")
        cells = batch, slice(None), _cells(rows, self.levels.rows), _cells(columns, self.levels.columns)
        self.sums[cells] += sums
        torch.maximum(self.largest[cells], largest, out=self.largest[cells])
        near = _near(weights, queries, keys)
        if near is not None:
            self.near[batch] += near

    def finish(self, lse: Tensor | None) -> SummaryValues:
        """Return the sums; rows that attend to no key have 0 everywhere.

        A row that attends to NaN, whose log-sum-exp (B, H, M) says so, has NaN, and so has whatever sums over all rows.
        """
        mass, moment, terms, top = self.rows.unbind(2)
        broken = torch.zeros_like(mass, dtype=torch.bool) if lse is None else lse.isnan() | lse.isposinf()
        of_heads = broken.any(-1, keepdim=True)
        # Rounded queries and keys may make a weight of 1 a little more.
        return SummaryValues(
            largest=self.largest.clamp(max=1.0),
            sums=self.sums,
            broken=broken,
            mass=mass,
            entropy=(0.0 - math.log(2) * terms).clamp(min=0.0).masked_fill(broken, math.nan),
            top=top.clamp(max=1.0).masked_fill(broken, math.nan),
            reach=(moment / mass.masked_fill(mass == 0, 1.0)).masked_fill(broken, math.nan),
            received=self.received.masked_fill(of_heads, math.nan),
            near=self.near.masked_fill(of_heads, math.nan),
        )


def _reach(weights: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_j w_ij and Σ_j w_ij · |query - key| of a tile, each (b, H, m)."""
    (first, last), (lowest, highest) = (torch.stack(of.aminmax()).tolist() for of in (queries, keys))
    if first >= highest or lowest >= last:
        sign = 1 if first >= highest else -1
        away = (sign * (queries - first)).to(weights.dtype)[:, None]
        mass, beside = weights.sum(-1), (sign * (first - keys)).to(weights.dtype)
        # One vector for all rows: torch multiplies it with a matrix in a fraction of the time of many small matrices.
        each = weights.split(1) if len(keys) > 1 else [weights]
        moment = [
            part.reshape(-1, part.shape[-1]).mv(of).view(part.shape[:-1]) for part, of in zip(each, beside, strict=True)
        ]
        return mass, mass * away + torch.cat(moment)
    distances = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs_().to(weights.dtype).unsqueeze(1)
    return weights.sum(-1), (weights * distances).sum(-1)


def _near(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Σ w within NEAR positions and at distances 0, 1 and -1, (b, H, 4); None if the tile is farther off."""
    if int(queries.min() - keys.max()) > NEAR or int(keys.min() - queries.max()) > NEAR:
        return None
    if len(queries) == len(keys) == 1 and bool((queries.diff() == 1).all() & (keys.diff() == 1).all()):
        first = int(queries[0, 0] - keys[0, 0])
        bands = [_diagonal(weights, first - distance) for distance in range(-NEAR, NEAR + 1)]
        return torch.stack([sum(bands), bands[NEAR], bands[NEAR + 1], bands[NEAR - 1]], -1)  # type: ignore[list-item]
    distances = (queries.unsqueeze(-1) - keys.unsqueeze(-2)).unsqueeze(1)
    kept = distances.abs() <= NEAR, distances == 0, distances == 1, distances == -1
    return torch.stack([(weights * keep).sum((-2, -1)) for keep in kept], -1)


def _diagonal(weights: Tensor, offset: int) -> Tensor:
    """The sum over one diagonal of a tile, (b, H); 0 if it does not cross the tile."""
    if not -weights.shape[-2] < offset < weights.shape[-1]:
        return weights.new_zeros(weights.shape[:2])
    return weights.diagonal(offset, -2, -1).sum(-1)


def _cells(stretch: slice, cell: int) -> slice:
    """The cells that a range of rows or columns overlaps."""
    return slice(stretch.start // cell, -(-stretch.stop // cell))


def _grouped(weights: Tensor, axis: int, start: int, cell: int, reduce: str) -> Tensor:
    """Reduce the entries of each cell along an axis whose first entry is number `start` of the map."""
    step = min(cell, AT_ONCE)
    groups = _steps(weights, axis, start % step, step, reduce)
    return groups if step == cell else _steps(groups, axis, start % cell // step, cell // step, reduce)


def _steps(weights: Tensor, axis: int, ahead: int, step: int, reduce: str) -> Tensor:
    """Reduce each `step` entries along an axis, padded with `ahead` zeros in front (neutral: no weight is below 0)."""
    if step == 1:
        return weights
    behind = -(ahead + weights.shape[axis]) % step
    if ahead or behind:
        weights = pad(weights, (ahead, behind) if axis == -1 else (0, 0, ahead, behind))
    return getattr(weights.unflatten(axis, (-1, step)), reduce)(axis)


class ArrayStore:
    """Arrays of a file by name; shared tensors are stored once."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._sources: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> str:
        """Store a tensor under a name, and return the name."""
        self.held[name] = tensor.contiguous()
        return name

    def shared(self, tensor: Tensor) -> str:
        """Store a tensor that several records may share, once, and return its name."""
        if id(tensor) not in self._names:
            self._names[id(tensor)] = self.add(f"shared.{len(self._names)}", tensor.detach().cpu())
            self._sources.append(tensor)  # its id is its own for as long as it is alive
        return self._names[id(tensor)]


def summary(
    seen: SummaryValues,
    levels: PyramidLevels,
    exists: UnmaskedCells,
    attending: Tensor,
    kind: str,
    arrays: ArrayStore,
    prefix: str,
) -> dict[str, Any]:
    """Store pyramid, profiles and metrics; `attending` (B, H, M) marks the rows that attend to some key."""
    tops = []
    for reduce, finest in (("max", seen.largest), ("mean", seen.sums)):
        for level, cells in enumerate(pyramid(finest.float(), levels, reduce)):
            bytes_, top = packed(cells, exists.level(level, cells.shape))
            arrays.add(f"{prefix}{reduce}.{level}", bytes_)
            tops.append(top)
    metrics = _metrics(seen, attending, kind)
    arrays.add(prefix + "tops", torch.stack(tops, -1))
    arrays.add(prefix + "entropy", seen.entropy.float())
    arrays.add(prefix + "received", seen.received.float())
    arrays.add(prefix + "largest", seen.top.float())
    arrays.add(prefix + "metrics", torch.stack(list(metrics.values()), -1).float())
    return {"cell": [levels.rows, levels.columns], "metrics": list(metrics), "prefix": prefix}


def _metrics(seen: SummaryValues, attending: Tensor, kind: str) -> Mapping[str, Tensor]:
    """Metrics of each head, (B, H), averaged over attending rows; NaN if there is none, or one attends to NaN."""
    count = attending.sum(-1)

    def mean(rows: Tensor) -> Tensor:
        return (rows * attending).sum(-1) / count

    def share(sums: Tensor) -> Tensor:
        # Rounded queries and keys may make a row sum to a little more than 1.
        return (sums / count).clamp(max=1.0)

    first = (seen.received > 0).to(torch.uint8).argmax(-1, keepdim=True)  # the first key that any row attends to
    metrics = {
        "entropy": mean(seen.entropy),
        "effective_keys": mean(seen.entropy.exp()),
        "top1": mean(seen.top),
        "sink": share(seen.received.gather(-1, first).squeeze(-1)),
    }
    if kind == "self":
        metrics["distance"] = mean(seen.reach)
        names = "local", "self", "previous", "next"
        metrics |= {name: share(of) for name, of in zip(names, seen.near.unbind(-1), strict=True)}
    return metrics
