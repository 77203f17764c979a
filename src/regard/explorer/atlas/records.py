"""Convert captured calls, or weights that another tool computed, to records: JSON fields and named arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...backends.torch.tile_scores import LOG2_E
from ...errors import AtlasError
from ...kernels.lens_pass import run_reductions
from ...lenses.base import WeightsLayout, WeightTile
from .captured_call import CapturedCall, is_causal
from .mask_json import by_rows, read_mask, written
from .normalizer_json import write_normalizer
from .pyramid import SHARE, PyramidLevels, UnmaskedCells
from .role_detection import RoleDetector
from .summary import ArrayStore, SummaryAccumulator, SummaryValues, summary
from .tokenized_text import CallShape, TokenLists, TokenTable, match_tokens

ROWS = 512
"""Rows and columns of a tile of plain weights."""


def records_from_weights(
    maps: Any, tokens: Any, tolerance: float, words: TokenTable
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Records of plain weights, and their arrays by name."""
    named = _named(maps)
    arrays, records = ArrayStore(), []
    with torch.no_grad():
        for number, (name, given) in enumerate(named.items()):
            weights = _checked(name, given, tolerance)
            batch, _, queries, keys = weights.shape
            positions = torch.arange(queries)[None], torch.arange(keys)[None]
            shape_says = "self" if queries == keys else "cross"
            kind, sides = match_tokens(CallShape(name, shape_says, batch, queries, keys, 1, positions), tokens)
            record = _weights_record(name, weights, kind, arrays, f"{number}.")
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
    """Validate weights and return them as (B, H, M, N) in half precision."""
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


def _weights_record(name: str, weights: Tensor, kind: str, arrays: ArrayStore, prefix: str) -> dict[str, Any]:
    batch, heads, queries, keys = weights.shape
    levels = PyramidLevels.fitting(queries, keys, SHARE * weights[0, 0].numel() * weights.element_size())
    layout = WeightsLayout(weights.shape[:2], batch, heads, queries, keys, torch.float32, weights.device)
    survey = SummaryAccumulator(layout, levels, (torch.arange(queries)[None], torch.arange(keys)[None]))
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
        "operator": "softmax",
        "mask": None,
        "bias": None,
        "rounding": 0.0,
        "arrays": {"weights": arrays.add(prefix + "weights", weights)},
        **summary(seen, levels, UnmaskedCells.nothing_masked(), seen.mass > 0, kind, arrays, prefix),
    }


def _tiles(weights: Tensor) -> Any:
    batch, _, queries, keys = weights.shape
    for sequence in range(batch):
        for top in range(0, queries, ROWS):
            for left in range(0, keys, ROWS):
                rows, columns = slice(top, min(top + ROWS, queries)), slice(left, min(left + ROWS, keys))
                part = weights[sequence : sequence + 1, :, rows, columns].float()
                yield WeightTile(
                    part, torch.special.xlogy(part, part) * LOG2_E, slice(sequence, sequence + 1), rows, columns
                )


def records_from_calls(
    calls: Sequence[CapturedCall], tokens: Sequence[Any]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Records of captured calls, each with its own tokens, and their arrays by name.

    Raises:
        AtlasError: tokens do not fit; a mask or a bias that an atlas cannot hold.
    """
    arrays, words = ArrayStore(), TokenTable()
    # What does not fit is said before anything is computed.
    with torch.no_grad():
        chosen = [match_tokens(_place(call), own) for call, own in zip(calls, tokens, strict=True)]
        records = []
        for number, (call, (kind, sides)) in enumerate(zip(calls, chosen, strict=True)):
            record = _record(replace(call, kind=kind), sides["key"], arrays, f"{number}.")
            record["tokens"] = {side: words.add(lists) for side, lists in sides.items()}
            records.append(record)
    return records, {**arrays.held, **words.arrays()}


def _place(call: CapturedCall) -> CallShape:
    sizes = len(call.query), call.query.shape[2], call.key.shape[2]
    causal = call.kind == "self" and is_causal(call.problem())
    return CallShape(call.name, call.kind, *sizes, call.steps, call.positions, call.guessed, causal)


def _record(call: CapturedCall, words: TokenLists | None, arrays: ArrayStore, prefix: str) -> dict[str, Any]:
    """The record of one call: query, key, log-sum-exp, mask and bias, and what one pass over its weights adds up.

    That pass makes the pyramid, the profiles and the roles. prefix: of the names of its arrays.
    """
    problem = call.problem()
    levels = pyramid_levels(call)
    layout = WeightsLayout.from_problem(problem)
    sums, roles = SummaryAccumulator(layout, levels, call.positions), RoleDetector.for_call(call, words)
    run_reductions(problem, call.lse.view(problem.weights_shape[:-1]), [sums, *roles.reductions])
    seen = sums.finish(call.lse)
    if call.normalizer is not None and not call.normalizer.sums_to_one:
        seen = seen.of_shares()
    lse = call.lse if call.errors is None else _lse_of_rounded(call, seen)
    attending = ~call.lse.isneginf()
    held = {"query": call.query, "key": call.key, "lse": lse}
    if call.weight is not None:
        held["weight"] = call.weight
    if call.norms is not None:
        held["norms"] = call.norms
    if _needs_positions(call):
        held |= {"query_positions": call.positions[0], "key_positions": call.positions[1]}
    grid = problem.grid()
    mask = None if call.mask is None else written(call.mask, grid, arrays.shared)
    exists = UnmaskedCells.nothing_masked()
    if mask is not None:  # as the atlas has it, so that cells and tiles say the same
        exists = UnmaskedCells.evaluate(
            read_mask(mask, arrays.held), grid, levels, seen.largest.view(*call.leading, *levels.shapes[0])
        )
    return {
        "name": call.name,
        "call": call.number,
        "steps": call.steps,
        "kind": call.kind,
        "leading": list(call.leading),
        "head_axis": call.has_heads,
        "heads": call.query.shape[1],
        "key_heads": call.key.shape[1],
        "queries": call.query.shape[2],
        "keys": call.key.shape[2],
        "score": "additive" if call.weight is not None else "dot" if call.features is None else "decayed dot",
        **({} if call.features is None else {"features": call.features}),
        "scale": call.scale,
        "softcap": call.softcap,
        **write_normalizer(call.normalizer, arrays.shared),
        "mask": mask,
        "bias": None if call.bias is None else written(call.bias, grid, arrays.shared),
        "rounding": call.rounding,
        "arrays": {name: arrays.add(prefix + name, tensor) for name, tensor in held.items()},
        **summary(seen, levels, exists, attending, call.kind, arrays, prefix),
        **roles.found(),
    }


def pyramid_levels(call: CapturedCall) -> PyramidLevels:
    """The pyramid whose size is at most SHARE times that of q and k."""
    heads = call.query.shape[1]
    numbers = call.query.shape[2] * call.query.shape[3] + call.key.shape[2] * call.key.shape[3] * (
        call.key.shape[1] / heads
    )
    return PyramidLevels.fitting(call.query.shape[2], call.key.shape[2], SHARE * numbers * call.query.element_size())


def _needs_positions(call: CapturedCall) -> bool:
    """Whether positions have to be stored: they are not 0..M-1 and 0..N-1, and a mask, bias or display needs them.

    In cross-attention those of the queries say nothing where no rule asks for them; then they count the rows.
    """
    queries, keys = call.positions
    if not torch.equal(keys, torch.arange(keys.shape[-1]).expand_as(keys)):
        return True
    if call.kind == "cross" and by_rows(call.mask) and by_rows(call.bias):
        return False
    return not torch.equal(queries, torch.arange(queries.shape[-1]).expand_as(queries))


def _lse_of_rounded(call: CapturedCall, seen: SummaryValues) -> Tensor:
    """The log-sum-exp of the rounded queries and keys, so that rows sum to 1 again."""
    known = call.lse.isfinite() & (seen.mass > 0)
    found = call.lse + seen.mass.masked_fill(~known, 1.0).log()
    if call.sinks is not None:  # a sink takes its weight as before
        found = torch.logaddexp(found, call.sinks.to(found.dtype)[:, None])
    return torch.where(known, found, call.lse)
