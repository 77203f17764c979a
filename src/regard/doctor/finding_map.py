"""Matrices that show a finding: which token moves which output, how far two runs are apart, weights of heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from .examination_report import ModelFinding, finding
from .softmax_capture import CELLS, CapturedWeights, capture_weights
from .subject import Subject

MOST_CHANGES = 96
"""Changes of a sequence; in a longer one, neighbouring tokens change together."""
MOST_WEIGHTS = 1 << 24
"""Weights of a map; of a larger one only the head that shows the finding is stored."""


@dataclass(frozen=True, eq=False)
class FindingMap:
    """One picture of a finding.

    kind: of "influence", values[0, i, j] is the largest absolute difference of output i when token j changes; of
    "attention", values are weights (heads, queries, keys), NaN where the mask hides a pair; of "difference",
    values[0, 0, i] is the largest absolute difference of output i between two runs that must agree.
    title: what is displayed, in words. values: float32 on the CPU. head: the one that shows the finding.
    at: (output or query, token or key) of the finding, where it has one. tolerance: the largest difference that
    rounding explains. cell: the rows and columns of what is described that each value is the largest of.
    """

    kind: Literal["influence", "attention", "difference"]
    title: str
    values: Tensor
    head: int = 0
    at: tuple[int, int] | None = None
    tolerance: float = 0.0
    cell: tuple[int, int] = (1, 1)

    @property
    def place(self) -> tuple[int, int] | None:
        """The row and column of `values` that `at` is in."""
        return None if self.at is None else (self.at[0] // self.cell[0], self.at[1] // self.cell[1])


Maps = tuple[FindingMap, ...]


def influence_map(
    subject: Subject,
    tolerance: float,
    *,
    at: tuple[int, int],
    sequence: Tensor | None = None,
    row: int | None = None,
    title: str = "How far each token moves each output",
    **changes: Any,
) -> Maps:
    """The influence of every token on every output, |y_i(x with another token j) - y_i(x)|; none unless `subject.maps`.

    Args:
        subject: the model; it runs once for each token, or for each of MOST_CHANGES stretches of tokens.
        tolerance: what rounding explains.
        at: (output, token) of the finding.
        sequence: the tokens, instead of those of the subject.
        row: the row of the batch whose tokens are changed and outputs compared; None for all.
        title: what is displayed, in words.
        changes: keywords, as of `Subject.run`.
    """
    if not subject.maps:
        return ()
    rows = slice(None) if row is None else slice(row, row + 1)
    base = subject.sequence if sequence is None else sequence
    cell = -(-base.shape[1] // CELLS)
    stretch = -(-base.shape[1] // (MOST_CHANGES * cell)) * cell
    try:
        values = _influence(subject, base, rows, stretch, cell, changes)
    except Exception:  # a finding without its picture is better than none
        return ()
    if stretch > 1:
        title += f", {stretch} neighbouring tokens at a time"
    return (FindingMap("influence", title, values[None], 0, at, tolerance, (cell, cell)),)


def _influence(subject: Subject, base: Tensor, rows: slice, stretch: int, cell: int, changes: dict[str, Any]) -> Tensor:
    """(outputs, tokens), in cells: how far outputs move when a stretch of tokens changes."""
    other = subject.others(base)
    first = subject.outputs(base, **changes)[rows]
    columns: list[Tensor] = []
    for start in range(0, base.shape[1], stretch):
        changed = base.clone()
        changed[rows, start : start + stretch] = other[rows, start : start + stretch]
        column = moves(subject.outputs(changed, **changes)[rows] - first)
        column = functional.pad(column, (0, -len(column) % cell)).unflatten(0, (-1, cell)).amax(1)
        columns += [column] * -(-min(stretch, base.shape[1] - start) // cell)
    return torch.stack(columns, 1).float().cpu()


def moves(difference: Tensor, axis: int = 1) -> Tensor:
    """The largest absolute difference at each position of an axis; infinity for NaN."""
    return difference.abs().nan_to_num(nan=torch.inf).movedim(axis, 0).flatten(1).amax(1)


def moved(difference: Tensor, tolerance: float, *, first: int = 0) -> dict[str, Any]:
    """The evidence of the output that moves most in (batch, length, features); empty where rounding explains it.

    first: the position of the first output in `difference`.
    """
    by_position = moves(difference)
    position = int(by_position.argmax())
    by = float(by_position[position])
    return {"moved": position + first, "by": by, "tolerance": tolerance} if by > tolerance else {}


def difference_map(subject: Subject, difference: Tensor, tolerance: float, *, title: str, first: int = 0) -> Maps:
    """The difference of two runs, (batch, length, features), by output; none unless `subject.maps`.

    first: the position of the first output in `difference`; those before it count as equal.
    """
    if not subject.maps:
        return ()
    by_output = functional.pad(moves(difference), (first, 0)).float().cpu()
    return (FindingMap("difference", title, by_output[None, None], 0, (0, int(by_output.argmax())), tolerance),)


def disagreement(
    subject: Subject,
    code: str,
    message: str,
    difference: Tensor,
    tolerance: float,
    *,
    title: str = "",
    first: int = 0,
    **settings: Any,
) -> list[ModelFinding]:
    """A finding where outputs that must agree, (batch, length, features), differ by more than rounding; else none.

    Its evidence is the output that moves most. title: of its map; without one it has none. first: as of `moved`.
    settings: of `finding`.
    """
    evidence = moved(difference, tolerance, first=first)
    if not evidence:
        return []
    maps = difference_map(subject, difference, tolerance, title=title, first=first) if title else ()
    return [finding(code, message, maps=maps, **evidence, **settings)]


def attention_map(
    subject: Subject, one: CapturedWeights, head: int = 0, at: tuple[int, int] | None = None, row: int = 0
) -> Maps:
    """The weights of a captured attention in one row of the batch; none unless `subject.maps`."""
    if not subject.maps or one.weights is None or one.visible is None:
        return ()
    row = min(row, one.weights.shape[0] - 1)
    weights, visible = one.weights[row], one.visible[row]
    title = f"Weights of head {head} of {one.place.module or 'the model'}"
    if one.cell != (1, 1):
        title += f", the largest of {one.cell[0]} queries and {one.cell[1]} keys each"
    if weights.numel() > MOST_WEIGHTS:
        weights, visible, head = weights[head : head + 1], visible[head : head + 1], 0
    values = weights.float().masked_fill(~visible, torch.nan).cpu()
    inside = at is not None and at[0] < one.shape[2] and at[1] < one.shape[3]
    return (FindingMap("attention", title, values, head, at if inside else None, cell=one.cell),)


IsWrong: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""is_wrong(queries, keys): True where no weight may be, for positions that broadcast to (queries, keys)."""


def attention_of_module(
    subject: Subject,
    module: str,
    is_wrong: IsWrong | None = None,
    sequence: Tensor | None = None,
    **changes: Any,
) -> Maps:
    """The weights of the first attention in a module, of the head with the largest weight among the wrong pairs.

    module: its name in `named_modules()`; "" for the first attention of the model. is_wrong: where no weight may be; a
    cell of several pairs is wrong where its last query and its first key are. None unless `subject.maps`, and where no
    attention is known.
    """
    if not subject.maps:
        return ()
    try:
        captured = capture_weights(subject, sequence, **changes)
    except Exception:  # a finding without its picture is better than none
        return ()
    for one in captured:
        if module and not f"{one.place.module}.".startswith(f"{module}."):
            continue
        length = (subject.sequence if sequence is None else sequence).shape[1]
        if is_wrong is None or one.weights is None or one.shape[2:] != (length, length):
            return attention_map(subject, one)
        rows, columns = (torch.arange(size, device=one.weights.device) for size in one.weights.shape[-2:])
        queries = ((rows + 1) * one.cell[0] - 1).clamp(max=length - 1)
        weights = one.weights[0].nan_to_num() * is_wrong(queries[:, None], columns * one.cell[1])
        head, rest = divmod(int(weights.argmax()), weights[0].numel())
        row, column = divmod(rest, weights.shape[-1])
        at = (int(queries[row]), column * one.cell[1]) if bool(weights.any()) else None
        return attention_map(subject, one, head, at)
    return ()
