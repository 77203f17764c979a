"""What the choice of a kernel takes, for a call with a structured mask that was seen before.

Goal: at most 30 µs. The limit is one look-up in a dict by shapes and mask, about 1 µs in Python.
"""

import statistics

import _timing
import torch
from _report import met, table

import regard
from regard.kernels import choose
from regard.kernels.validation import make_problem
from regard.masks import Mask


def window() -> Mask:
    return regard.masks.causal() & regard.masks.window(before=511)


def main(calls: int = 200, rounds: int = 31) -> None:
    print(_timing.machine())
    short, query = torch.randn(1, 8, 256, 64), torch.randn(1, 8, 16384, 64)
    choose(make_problem(short, short, short, mask=window()))  # what is loaded once is no planning
    kept = window()
    posed = make_problem(query, query, query, mask=kept)
    first = _timing.seconds(lambda: choose(posed), 1)
    works = {
        "the choice, the same mask": lambda: choose(posed),
        "the choice, the mask made anew": lambda: choose(make_problem(query, query, query, mask=window())),
        "of that: mask and problem": lambda: make_problem(query, query, query, mask=window()),
    }
    rows = [["the choice, never seen", f"{first * 1e6:,.0f} µs", ""]]
    for name, work in works.items():
        spent = statistics.median(_timing.seconds(work, calls) for _ in range(rounds))
        rows.append([name, f"{spent * 1e6:,.1f} µs", ""])
        if name == "the choice, the same mask":
            rows[-1][-1] = met(round(spent * 1e6, 1), 30, most=True)
    table("Planning: causal window, n = 16,384 (`benchmarks/planning.py`)", ["what", "time", "goal, µs"], rows)


if __name__ == "__main__":
    main()
