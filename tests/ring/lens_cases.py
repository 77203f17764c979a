"""Lenses for the tests of rings, and what of their results belongs to rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import regard
from regard import heads, lenses, masks
from regard.core.problem import Problem

WORDS = ("the", "cat", ",", "sat", "on", ".")


def all_lenses(length: int, seed: int) -> dict[str, Any]:
    """Each lens of the library that several processes can compute, some of them twice, by names of the test."""
    generator = torch.Generator().manual_seed(seed)
    cells = max(1, min(3, length)), max(1, min(5, length))
    tokens = [WORDS[n] for n in torch.randint(len(WORDS), (length,), generator=generator).tolist()]
    return {
        "entropy": lenses.Entropy(),
        "received": lenses.Received(),
        "distance": lenses.Distance(),
        "near": lenses.Distance((2, 9)),
        "mean": lenses.Pooled(cells),
        "sum": lenses.Pooled((cells[1], cells[0]), reduce="sum"),
        "max": lenses.Pooled(cells, reduce="max"),
        "finest": lenses.Pooled(length, reduce="max"),
        "mass": lenses.Mass(torch.randint(-1, 4, (length,), generator=generator)),
        "columns": lenses.Mass([0] * length, list(range(length))),
        "top": lenses.TopK(3),
        "many": lenses.TopK(2000),
        "largest score": lenses.MaxLogit(),
        "largest scores": lenses.MaxLogit("row"),
        "weights": lenses.Weights(),
        "some columns": lenses.Weights(columns=slice(length // 3, None, 2)),
        "corner": lenses.Weights(slice(0, length, 3), slice(length // 2, length)),
        "metrics": heads.Metrics(local=3),
        "roles": heads.Roles(tokens),
        "divergence": heads.JensenShannon(),
        "values": heads.Values(),
    }


def far_below(tensors: dict[str, Tensor], keys: list[int]) -> None:
    """Give these keys the score -infinity with all queries of a case, by infinity in one feature."""
    tensors["query"][..., 0] = -tensors["query"][..., 0].abs() - 0.1
    tensors["key"][..., keys, 0] = torch.inf


def parts(name: str, result: Any) -> tuple[dict[str, tuple[Tensor, int]], dict[str, Tensor]]:
    """The tensors of a result that belong to rows or keys, with the axis of these, and all others."""
    match name:
        case "entropy" | "largest scores":
            return {name: (result, -1)}, {}
        case "distance" | "near":
            return {f"{name} mean": (result.mean, -1)}, {f"{name} histogram": result.histogram, "edges": result.edges}
        case "top" | "many":
            return {f"{name} weights": (result.weights, -2), f"{name} columns": (result.columns, -2)}, {}
        case "weights" | "some columns" | "values":
            return {name: (result, -2)}, {}
        case "metrics":
            return {}, {f"{name} {field}": getattr(result, field) for field in result._fields}
        case "roles":
            found = {"scores": result.scores, "rows": result.rows, "chances": result.chances}
            return {}, {**found, "queries": torch.tensor(result.queries)}
        case _:
            return {}, {name: result}


@dataclass(frozen=True)
class Shuffled:
    """A layout of pieces that are not in the order of their positions: tens of them, dealt out from the end."""

    def pieces(self, length: int, processes: int) -> Sequence[Sequence[range]]:
        tens = [range(start, min(start + 10, length)) for start in range(0, length, 10)]
        return [tens[rank::processes][::-1] for rank in range(processes)]


@dataclass(frozen=True)
class Coverage:
    """A lens of one's own: how many keys have at least this weight."""

    least: float = 0.1

    def start(self, problem: Problem) -> CoverageState:
        return CoverageState(lenses.WeightsLayout.from_problem(problem), self.least)


@dataclass(frozen=True)
class ShardedCoverage(Coverage):
    """The same, for several processes."""

    def start_shard(self, problem: Problem, shard: lenses.RowShard) -> CoverageState:
        return self.start(problem)


class CoverageState:
    """Counts by row."""

    needs_entropy_terms = False

    def __init__(self, layout: lenses.WeightsLayout, least: float) -> None:
        self.layout, self.least, self.counts = layout, least, layout.zeros(layout.queries)
        self.reductions = (self,)

    def add(self, tile: lenses.WeightTile) -> None:
        self.counts[tile.batch, :, tile.rows] += (tile.weights >= self.least).sum(-1)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return self.layout.to_result(self.counts)


def last_inputs(length: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The last queries of a sequence, and all of its keys and values."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(1, 2, n, 8, generator=generator) for n in (queries, length, length))
    return query, key, value


def last_lenses(length: int) -> dict[str, Any]:
    """Lenses whose settings are those of all rows or keys, and results the same in all processes."""
    return {
        "mass": lenses.Mass([n % 3 for n in range(length)]),
        "histogram": lenses.Distance(),
        "pooled": lenses.Pooled((3, 4)),
        "corner": lenses.Weights(slice(1, 4), slice(2, 30, 3)),
        "roles": heads.Roles([WORDS[n % 5] for n in range(length)]),
    }


def last_results(seen: Any, chosen: dict[str, Any]) -> dict[str, np.ndarray]:
    """The results of these lenses."""
    found = {name: seen[lens] for name, lens in chosen.items()}
    found |= {"histogram": found["histogram"].histogram, "edges": found["histogram"].edges}
    found["roles"] = torch.stack([found["roles"].scores, found["roles"].rows, found["roles"].chances])
    return {name: tensor.numpy() for name, tensor in found.items()}


def last_queries(length: int, queries: int) -> dict[str, np.ndarray]:
    """The results of one process."""
    chosen = last_lenses(length)
    seen = regard.observe(*last_inputs(length, queries), *chosen.values(), mask=masks.causal())
    return last_results(seen, chosen)
