"""Weights that another tool computed, as an atlas keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import AtlasError
from ...lenses.base import Frame, Tile
from .existing import Existing
from .keeping import Arrays, summary
from .levels import SHARE, Levels
from .survey import Survey
from .tokens import Place, Words, words_for

ROWS = 512
"""Rows and columns that are looked at together."""


def records_of(
    maps: Any, tokens: Any, tolerance: float, words: Words
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The records of arrays, and the arrays that they have."""
    named = _named(maps)
    arrays, records = Arrays(), []
    with torch.no_grad():
        for number, (name, given) in enumerate(named.items()):
            weights = _checked(name, given, tolerance)
            batch, _, queries, keys = weights.shape
            positions = torch.arange(queries)[None], torch.arange(keys)[None]
            shape_says = "self" if queries == keys else "cross"
            kind, sides = words_for(Place(name, shape_says, batch, queries, keys, 1, positions), tokens)
            record = _record(name, weights, kind, arrays, f"{number}.")
            record["tokens"] = {side: words.add(lists) for side, lists in sides.items()}
            records.append(record)
    return records, arrays.held


def _named(maps: Any) -> Mapping[str, Any]:
    if isinstance(maps, Mapping) and all(isinstance(name, str) for name in maps):
        named = maps
    elif isinstance(maps, Sequence) and not isinstance(maps, str):
        named = {f"layers.{number}": weights for number, weights in enumerate(maps)}
    else:
        raise AtlasError(
            f"from_weights needs arrays by name, {{'layers.0': (heads, M, N)}}, or a list of them; it has a "
            f"{type(maps).__name__}"
        )
    if not named:
        raise AtlasError("from_weights needs at least one array of weights; it has none")
    return named


def _checked(name: str, given: Any, tolerance: float) -> Tensor:
    """Weights (B, H, M, N) in half precision."""
    try:
        weights = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise AtlasError(f"the weights {name!r} need to be an array; they are a {type(given).__name__}") from None
    if weights.ndim not in (3, 4) or not weights.is_floating_point() or not weights.numel():
        raise AtlasError(
            f"the weights {name!r} are {weights.dtype} {tuple(weights.shape)}; they need floating-point numbers of the "
            "shape (heads, M, N) or (batch, heads, M, N), none of them 0"
        )
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()):
        least = float(weights.min())
        has = f"one is {least}" if least < 0 else "some are NaN or infinite"
        raise AtlasError(f"the weights {name!r} need to be softmax weights, 0 to 1, and {has}: are these scores?")
    most = float(weights.sum(-1, dtype=torch.float32).max())
    if most > 1 + tolerance:
        raise AtlasError(
            f"a row of the weights {name!r} sums to {most:.4g}; it needs to be at most 1 + {tolerance}: are rows the "
            "last axis but one, and is this one layer alone?"
        )
    return (weights if weights.ndim == 4 else weights[None]).to(torch.float16)


def _record(name: str, weights: Tensor, kind: str, arrays: Arrays, prefix: str) -> dict[str, Any]:
    batch, heads, queries, keys = weights.shape
    levels = Levels.of(queries, keys, SHARE * weights[0, 0].numel() * weights.element_size())
    frame = Frame(weights.shape[:2], batch, heads, queries, keys, torch.float32, weights.device)
    survey = Survey(frame, levels, (torch.arange(queries)[None], torch.arange(keys)[None]))
    for tile in _tiles(weights):
        survey.add(tile)
    seen = survey.finish(None)
    return {
        "name": name,
        "call": 0,
        "steps": 1,
        "kind": kind,
        "leading": [batch, heads],
        "head_axis": True,
        "heads": heads,
        "key_heads": heads,
        "queries": queries,
        "keys": keys,
        "score": "weights",
        "scale": 1.0,
        "softcap": None,
        "mask": None,
        "bias": None,
        "rounding": 0.0,
        "arrays": {"weights": arrays.add(prefix + "weights", weights)},
        **summary(seen, levels, Existing.everywhere(), seen.mass > 0, kind, arrays, prefix),
    }


def _tiles(weights: Tensor) -> Any:
    batch, _, queries, keys = weights.shape
    for sequence in range(batch):
        for top in range(0, queries, ROWS):
            for left in range(0, keys, ROWS):
                rows, columns = slice(top, min(top + ROWS, queries)), slice(left, min(left + ROWS, keys))
                part = weights[sequence : sequence + 1, :, rows, columns].float()
                yield Tile(
                    part, torch.special.xlogy(part, part) * _LOG2_E, slice(sequence, sequence + 1), rows, columns
                )


_LOG2_E = 1.4426950408889634
