"""What an atlas keeps of weights beside themselves: a pyramid, profiles and metrics, as arrays under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .existing import Existing
from .levels import Levels, packed, pyramid
from .survey import Surveyed


class Arrays:
    """Tensors under names, each once."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._sources: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> str:
        """Hold a tensor under a name."""
        self.held[name] = tensor.contiguous()
        return name

    def shared(self, tensor: Tensor) -> str:
        """The name of a tensor that others may hold too."""
        if id(tensor) not in self._names:
            self._names[id(tensor)] = self.add(f"shared.{len(self._names)}", tensor.detach().cpu())
            self._sources.append(tensor)  # its id is its own for as long as it is alive
        return self._names[id(tensor)]


REVISION = 2
"""Of what is kept beside queries and keys. 1 had no row maxima, and could not tell cells without a pair from 0."""


def summary(
    seen: Surveyed, levels: Levels, exists: Existing, attending: Tensor, kind: str, arrays: Arrays, prefix: str
) -> dict[str, Any]:
    """The pyramid, the profiles and the metrics of what was seen, over rows that attend to something: (B, H, M)."""
    tops = []
    for reduce, finest in (("max", seen.largest), ("mean", seen.sums)):
        for level, cells in enumerate(pyramid(finest.float(), levels, reduce)):
            bytes_, top = packed(cells, _known(exists.of(level, cells.shape), seen.broken, levels.cell(level)[0]))
            arrays.add(f"{prefix}{reduce}.{level}", bytes_)
            tops.append(top)
    metrics = _metrics(seen, attending, kind)
    arrays.add(prefix + "tops", torch.stack(tops, -1))
    arrays.add(prefix + "entropy", seen.entropy.float())
    arrays.add(prefix + "received", seen.received.float())
    arrays.add(prefix + "largest", seen.top.float())
    arrays.add(prefix + "metrics", torch.stack(list(metrics.values()), -1).float())
    return {"revision": REVISION, "cell": [levels.rows, levels.columns], "metrics": list(metrics), "prefix": prefix}


def _known(exists: Tensor | None, broken: Tensor, high: int) -> Tensor | None:
    """Which cells have a number: those with a pair, (B, H, R, C), but where one of their rows attends to NaN."""
    if not bool(broken.any()):
        return exists
    rows = torch.nn.functional.pad(broken, (0, -broken.shape[-1] % high)).unflatten(-1, (-1, high))
    known = ~rows.any(-1, keepdim=True)
    return known if exists is None else exists & known


def _metrics(seen: Surveyed, attending: Tensor, kind: str) -> Mapping[str, Tensor]:
    """Numbers for each head, (B, H), over its rows that attend to something; NaN where none does, or one to NaN."""
    count = attending.sum(-1)

    def mean(rows: Tensor) -> Tensor:
        return (rows * attending).sum(-1) / count

    first = (seen.received > 0).to(torch.uint8).argmax(-1, keepdim=True)  # the first key that any row attends to
    metrics = {
        "entropy": mean(seen.entropy),
        "effective_keys": mean(seen.entropy.exp()),
        "top1": mean(seen.top),
        "sink": seen.received.gather(-1, first).squeeze(-1) / count,
    }
    if kind == "self":
        metrics["distance"] = mean(seen.reach)
        names = "local", "self", "previous", "next"
        metrics |= {name: of / count for name, of in zip(names, seen.near.unbind(-1), strict=True)}
    return metrics
