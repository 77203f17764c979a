"""Calls as records of an atlas: its weights are looked at once, and all that is kept is put into arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...lenses.base import Frame
from ...observing import sweep
from .backwards import looks_back
from .existing import Existing
from .finding import RolesOf
from .forms import by_rows, read_mask, written
from .keeping import Arrays, summary
from .levels import SHARE, Levels
from .survey import Survey, Surveyed
from .tokens import Lists, Place, Words, words_for

if TYPE_CHECKING:
    from ..calls import Call


def records_of(calls: Sequence[Call], tokens: Sequence[Any]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The records of some calls, each with its own tokens, and the arrays that they have.

    Raises:
        AtlasError: tokens do not fit; a mask or a bias that an atlas cannot hold.
    """
    arrays, words = Arrays(), Words()
    # What does not fit is said before anything is computed.
    with torch.no_grad():
        chosen = [words_for(_place(call), own) for call, own in zip(calls, tokens, strict=True)]
        records = []
        for number, (call, (kind, sides)) in enumerate(zip(calls, chosen, strict=True)):
            record = _record(replace(call, kind=kind), sides["key"], arrays, f"{number}.")
            record["tokens"] = {side: words.add(lists) for side, lists in sides.items()}
            records.append(record)
    return records, {**arrays.held, **words.arrays()}


def _place(call: Call) -> Place:
    sizes = len(call.query), call.query.shape[2], call.key.shape[2]
    looking = call.kind == "self" and looks_back(call.problem())
    return Place(call.name, call.kind, *sizes, call.steps, call.positions, call.guessed, looking)


def _record(call: Call, words: Lists | None, arrays: Arrays, prefix: str) -> dict[str, Any]:
    problem = call.problem()
    levels = levels_of(call)
    frame = Frame.of(problem)
    survey, roles = Survey(frame, levels, call.positions), RolesOf.call(call, words)
    sweep(problem, call.lse.view(problem.weights_shape[:-1]), [survey, *roles.reductions])
    seen = survey.finish(call.lse)
    lse = call.lse if call.errors is None else _matched(call, seen)
    attending = ~call.lse.isneginf()
    held = {"query": call.query, "key": call.key, "lse": lse}
    if call.weight is not None:
        held["weight"] = call.weight
    if _placed(call):
        held |= {"query_positions": call.positions[0], "key_positions": call.positions[1]}
    grid = problem.grid()
    mask = None if call.mask is None else written(call.mask, grid, arrays.shared)
    exists = Existing.everywhere()
    if mask is not None:  # as the atlas has it, so that cells and tiles say the same
        exists = Existing.by(
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
        "score": "dot" if call.weight is None else "additive",
        "scale": call.scale,
        "softcap": call.softcap,
        "mask": mask,
        "bias": None if call.bias is None else written(call.bias, grid, arrays.shared),
        "rounding": call.rounding,
        "arrays": {name: arrays.add(prefix + name, tensor) for name, tensor in held.items()},
        **summary(seen, levels, exists, attending, call.kind, arrays, prefix),
        **roles.found(),
    }


def levels_of(call: Call) -> Levels:
    """The levels that the sizes of q and k allow."""
    heads = call.query.shape[1]
    numbers = call.query.shape[2] * call.query.shape[3] + call.key.shape[2] * call.key.shape[3] * (
        call.key.shape[1] / heads
    )
    return Levels.of(call.query.shape[2], call.key.shape[2], SHARE * numbers * call.query.element_size())


def _placed(call: Call) -> bool:
    """Whether positions are to be kept: those that are not 0..M-1 and 0..N-1, and say something.

    In cross-attention those of the queries say nothing where no rule asks for them; then they count the rows.
    """
    queries, keys = call.positions
    if not torch.equal(keys, torch.arange(keys.shape[-1]).expand_as(keys)):
        return True
    if call.kind == "cross" and by_rows(call.mask) and by_rows(call.bias):
        return False
    return not torch.equal(queries, torch.arange(queries.shape[-1]).expand_as(queries))


def _matched(call: Call, seen: Surveyed) -> Tensor:
    """The log-sum-exp of what is kept: rounded queries and keys, whose rows then sum to 1 again."""
    known = call.lse.isfinite() & (seen.mass > 0)
    found = call.lse + seen.mass.masked_fill(~known, 1.0).log()
    if call.sinks is not None:  # a sink takes its weight as before
        found = torch.logaddexp(found, call.sinks.to(found.dtype)[:, None])
    return torch.where(known, found, call.lse)
