"""The steps of a beam search, and the hypotheses that follow from their back pointers.

Shapes: R rows of a step, H hypotheses, T steps, S source tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.translation.vocabulary import PAD


class StepWeights(NamedTuple):
    """Attention weights of a step: to the source [R, ..., S], to the target so far [R, ..., t]; None: not observed."""

    weights: Tensor | None = None
    self_weights: Tensor | None = None


@dataclass(frozen=True)
class SearchStep:
    """One step of all beams: the input tokens, the row of the previous step that each continues, the weights."""

    tokens: Tensor  # [R]
    parents: Tensor  # [R]
    attention: StepWeights


class TracedPath(NamedTuple):
    """The input tokens of one hypothesis, BEGIN first, and the attention weights of its steps."""

    tokens: list[int]
    weights: Tensor | None  # [T, ..., S]
    self_weights: Tensor | None  # [T, ..., T]


def trace(history: Sequence[SearchStep], ends: Sequence[tuple[int, int]]) -> list[TracedPath]:
    """Follow back pointers from each (length, row in the last step) of `ends`; results are on the CPU.

    Values behind a hypothesis' length mean nothing.
    """
    device, steps = history[0].tokens.device, len(history)
    lengths, rows = torch.tensor(ends, device=device).unbind(1)
    tokens = history[0].tokens.new_full((len(ends), steps), PAD)
    weights = self_weights = None
    for step in reversed(range(steps)):
        lasting = lengths > step  # the others ended before this step
        selected, record = rows[lasting], history[step]
        tokens[lasting, step] = record.tokens[selected]
        weights = _copy_rows(weights, lasting, step, record.attention.weights, selected, None, steps)
        # A cache that evicts keys without a future query has the latest columns.
        self_weights = _copy_rows(self_weights, lasting, step, record.attention.self_weights, selected, step + 1, steps)
        rows[lasting] = record.parents[selected]
    return [
        TracedPath(line, None if weights is None else weights[row], None if self_weights is None else self_weights[row])
        for row, line in enumerate(tokens.tolist())
    ]


def _copy_rows(
    collected: Tensor | None,
    lasting: Tensor,
    step: int,
    weights: Tensor | None,
    rows: Tensor,
    end: int | None,
    steps: int,
) -> Tensor | None:
    """Copy rows of a step's weights into those of all steps, allocated if None, with columns that end at `end`."""
    if weights is None:
        return collected
    columns = weights.shape[-1]
    if collected is None:
        shape = (len(lasting), steps, *weights.shape[1:-1], columns if end is None else steps)
        collected = torch.zeros(shape, dtype=weights.dtype)
    end = columns if end is None else end
    collected[lasting.cpu(), step, ..., end - columns : end] = weights[rows].cpu()
    return collected
