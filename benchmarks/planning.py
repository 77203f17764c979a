"""What the choice of a kernel takes, for a call with a structured mask that was seen before, and for one never seen.

Goals: at most 30 µs, and 2 ms. The limit of the first is one look-up in a dict by shapes and mask, about 1 µs in
Python; of the second a few operations for each kernel and each row of tiles.
"""

import statistics
from collections.abc import Callable

import _timing
import torch
from _report import met, table

from regard import masks
from regard.kernels import choose
from regard.kernels.validation import make_problem
from regard.masks import Mask


def window() -> Mask:
    return masks.causal() & masks.window(before=511)


def first_choice(make: Callable[[int, int], Mask | None], first: int, count: int = 31) -> float:
    """The median CPU seconds of the choice for lengths from `first` on, none of which is rounded to another's."""
    spent = []
    for number in range(count):
        length = round(first * 1.07**number)
        query, key = (
            torch.zeros(1, 1, 1, 64).expand(2, 8, length, 64),
            torch.zeros(1, 1, 1, 64).expand(2, 2, length, 64),
        )
        problem = make_problem(query, key, key, mask=make(number, length))
        spent.append(_timing.cpu_seconds(lambda problem=problem: choose(problem)))
    return statistics.median(spent)


FIRST: dict[str, Callable[[int, int], Mask | None]] = {
    "no mask": lambda number, length: None,
    "causal": lambda number, length: masks.causal(),
    "causal window": lambda number, length: masks.causal() & masks.window(7 + number),
    "padding": lambda number, length: masks.padding([number + 1, length]),
    "causal window and padding": lambda number, length: (
        masks.causal() & masks.window(7 + number) & masks.padding([number + 1, length])
    ),
}


def main(calls: int = 200, rounds: int = 31) -> None:
    print(_timing.machine())
    short, query = torch.randn(1, 8, 256, 64), torch.randn(1, 8, 16384, 64)
    choose(make_problem(short, short, short, mask=window()))  # what is loaded once is no planning
    kept = window()
    posed = make_problem(query, query, query, mask=kept)
    works = {
        "the choice, the same mask": lambda: choose(posed),
        "the choice, the mask made anew": lambda: choose(make_problem(query, query, query, mask=window())),
        "of that: mask and problem": lambda: make_problem(query, query, query, mask=window()),
    }
    rows = []
    for name, work in works.items():
        spent = statistics.median(_timing.seconds(work, calls) for _ in range(rounds))
        rows.append([name, f"{spent * 1e6:,.1f} µs", ""])
        if name == "the choice, the same mask":
            rows[-1][-1] = met(round(spent * 1e6, 1), 30, most=True)
    table("Planning: causal window, n = 16,384 (`benchmarks/planning.py`)", ["what", "time", "goal, µs"], rows)
    firsts = []
    for name, make in FIRST.items():
        near, far = first_choice(make, 320), first_choice(make, 8192)
        goal = met(round(near * 1e3, 2), 2, most=True)
        firsts.append([name, f"{near * 1e3:.2f} ms", f"{far * 1e3:.2f} ms", goal])
    columns = ["mask", "320 to 2,400 tokens", "8,192 to 62,000 tokens", "goal for the former, ms"]
    table("The first choice for a problem never seen, CPU time, median of 31", columns, firsts)


if __name__ == "__main__":
    main()
