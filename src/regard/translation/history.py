"""What a search leaves behind: its steps, and the way back from each ending.

Shapes: R rows of a step, H endings, T steps, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.translation.vocabulary import PAD


class Looked(NamedTuple):
    """Where a step looked, if it was observed: weights [R, ..., S] at the source, [R, ..., t] at the target so far."""

    weights: Tensor | None = None
    self_weights: Tensor | None = None


@dataclass(frozen=True)
class Moment:
    """One step of all beams: what went in, which row of the step before each came from, where each looked."""

    tokens: Tensor  # [R]
    parents: Tensor  # [R]
    looked: Looked


class Traced(NamedTuple):
    """The tokens that went in, BEGIN first, and where each step looked, on the way to one ending."""

    tokens: list[int]
    weights: Tensor | None  # [T, ..., S]
    self_weights: Tensor | None  # [T, ..., T]


def trace(moments: Sequence[Moment], ends: Sequence[tuple[int, int]]) -> list[Traced]:
    """The ways to endings, each told by its length and its row in its last step; results are on the CPU.

    What lies behind an ending's length means nothing.
    """
    device, steps = moments[0].tokens.device, len(moments)
    lengths, rows = torch.tensor(ends, device=device).unbind(1)
    tokens = moments[0].tokens.new_full((len(ends), steps), PAD)
    weights = self_weights = None
    for step in reversed(range(steps)):
        there = lengths > step  # the others ended before this step
        at, moment = rows[there], moments[step]
        tokens[there, step] = moment.tokens[at]
        weights = _put(weights, there, step, moment.looked.weights, at, None, steps)
        # A cache that drops what no one looks at any more has the latest columns.
        self_weights = _put(self_weights, there, step, moment.looked.self_weights, at, step + 1, steps)
        rows[there] = moment.parents[at]
    return [
        Traced(line, None if weights is None else weights[row], None if self_weights is None else self_weights[row])
        for row, line in enumerate(tokens.tolist())
    ]


def _put(
    held: Tensor | None, there: Tensor, step: int, seen: Tensor | None, rows: Tensor, end: int | None, steps: int
) -> Tensor | None:
    """Some rows of what a step has seen, put into what is held for all steps, with columns up to `end`."""
    if seen is None:
        return held
    columns = seen.shape[-1]
    if held is None:
        held = torch.zeros(len(there), steps, *seen.shape[1:-1], columns if end is None else steps, dtype=seen.dtype)
    end = columns if end is None else end
    held[there.cpu(), step, ..., end - columns : end] = seen[rows].cpu()
    return held
