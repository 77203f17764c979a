"""Combinations of choices, few of them, among which every few choices meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from math import prod

Choices = dict[str, str]


def covering(
    axes: Mapping[str, Sequence[str]],
    strength: int,
    possible: Callable[[Choices], bool] = lambda choices: True,
    *,
    most: int | None = None,
) -> list[Choices]:
    """Rows with one value for each axis, so that any `strength` values of different axes stand together in some row.

    A fault that needs `strength` circumstances to come together is then met, at the cost of hundreds of rows where all
    combinations are millions. Greedy and deterministic. `possible` is asked about part of a row, too: once it refuses,
    it has to refuse every row that holds these choices, and each axis needs a value that it never refuses. Axes with
    more than `most` combinations need not all meet: of these, any one value less stands together.

    >>> rows = covering({"sky": ["clear", "rain"], "day": ["work", "rest"], "place": ["in", "out"]}, strength=2)
    >>> len(rows)
    4
    """
    chosen = _sets_of_axes(axes, strength, most)
    open_targets = dict.fromkeys(
        target
        for names in chosen
        for values in product(*(axes[name] for name in names))
        if possible(dict(target := tuple(zip(names, values, strict=True))))
    )
    sets_with = {name: [names for names in chosen if name in names] for name in axes}
    rows = []
    while open_targets:
        row = dict(next(iter(open_targets)))
        for name in axes:
            if name not in row:
                options = [value for value in axes[name] if possible({**row, name: value})]
                known = [names for names in sets_with[name] if all(other in row or other == name for other in names)]
                row[name] = max(options, key=lambda value: _gain(open_targets, {**row, name: value}, known))
        rows.append({name: row[name] for name in axes})
        for names in chosen:
            open_targets.pop(tuple([(name, row[name]) for name in names]), None)
    return rows


def _sets_of_axes(axes: Mapping[str, Sequence[str]], strength: int, most: int | None) -> list[tuple[str, ...]]:
    """The axes whose values have to meet, `strength` of them at a time, or fewer where they have too many values."""
    few: dict[tuple[str, ...], None] = {}
    for names in combinations(axes, strength):
        if most is None or strength == 1 or prod(len(axes[name]) for name in names) <= most:
            few[names] = None
        else:
            few |= dict.fromkeys(combinations(names, strength - 1))
    held = {inner for names in few for inner in combinations(names, strength - 1) if len(names) == strength}
    return [names for names in few if names not in held]


def _gain(open_targets: Mapping, row: Choices, sets: Sequence[tuple[str, ...]]) -> int:
    """How many open targets a choice closes, with what the row holds already."""
    return sum(tuple([(name, row[name]) for name in names]) in open_targets for names in sets)
