"""Lenses for the tests of rings, and what of their results belongs to rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard import heads, lenses

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
        "sum": lenses.Pooled(cells[::-1], reduce="sum"),
        "max": lenses.Pooled(cells, reduce="max"),
        "finest": lenses.Pooled(length, reduce="max"),
        "mass": lenses.Mass(torch.randint(-1, 4, (length,), generator=generator)),
        "columns": lenses.Mass([0] * length, list(range(length))),
        "top": lenses.TopK(3),
        "many": lenses.TopK(2000),
        "weights": lenses.Weights(),
        "some columns": lenses.Weights(columns=slice(length // 3, None, 2)),
        "corner": lenses.Weights(slice(0, length, 3), slice(length // 2, length)),
        "metrics": heads.Metrics(local=3),
        "roles": heads.Roles(tokens),
        "divergence": heads.JensenShannon(),
        "values": heads.Values(),
    }


def parts(name: str, result: Any) -> tuple[dict[str, tuple[Tensor, int]], dict[str, Tensor]]:
    """The tensors of a result that belong to rows or keys, with the axis of these, and all others."""
    match name:
        case "entropy":
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
