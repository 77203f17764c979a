"""Combinations of choices, few of them, among which every few choices meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Choices = dict[str, str]


def covering(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    possible: Callable[[Choices], bool] = lambda choices: True,
) -> list[Choices]:
    """Rows with one value for each axis, so that any `strength` values of different axes stand together in some row.

    A fault that needs `strength` circumstances to come together is then met, at the cost of hundreds of rows where all
    combinations are millions. Greedy and deterministic. `possible` is asked about part of a row, too: once it refuses,
    it has to refuse every row that holds these choices, and each axis needs a value that it never refuses.

    >>> rows = covering({"sky": ["clear", "rain"], "day": ["work", "rest"], "place": ["in", "out"]}, strength=2)
    >>> len(rows)
    4
    """
    open_targets = dict.fromkeys(
        target
        for names in combinations(axes, strength)
        for values in product(*(axes[name] for name in names))
        if possible(dict(target := tuple(zip(names, values, strict=True))))
    )
    order = {name: place for place, name in enumerate(axes)}
    rows = []
    while open_targets:
        row = dict(next(iter(open_targets)))
        for name in axes:
            if name not in row:
                options = [value for value in axes[name] if possible({**row, name: value})]
                row[name] = max(options, key=lambda value: _gain(open_targets, row, (name, value), order, strength))
        rows.append({name: row[name] for name in axes})
        for target in combinations(rows[-1].items(), strength):
            open_targets.pop(target, None)
    return rows


def _gain(open_targets: Mapping, row: Choices, choice: tuple[str, str], order: Mapping[str, int], strength: int) -> int:
    """How many open targets a choice closes, with what the row holds already."""
    return sum(
        tuple(sorted((*others, choice), key=lambda item: order[item[0]])) in open_targets
        for others in combinations(row.items(), strength - 1)
    )
