"""The time and the memory of work on a GPU beside its peer's, as the cells of a row."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import _report
import torch
from _gpu_report import described
from _gpu_rows import Row
from _gpu_work import OURS, Place, Work
from torch import Tensor

ROUNDS, REPEATED, LONG = 3, 20, 400
"""Rounds of a row; milliseconds of a side in each; milliseconds from which on a call is measured once a round."""
WITHIN = 3e-2
"""How far the norm of a difference may be from a peer's, in bfloat16: more is no rounding."""
COLUMNS = "work", "peer", "peer's", "regard's", "ratio", "wanted", "peer's memory", "regard's", "differs by"


def measured(row: Row) -> list[str]:
    """The cells of a row: times and memory of both sides, the ratio beside the floor, and the difference."""
    torch.manual_seed(0)
    sides = dict(row.sides(Place()))
    failed = {name: described(error) for name, side in sides.items() if (error := fails(side))}
    able = {name: side for name, side in sides.items() if name not in failed}
    spent, held = in_turn(able), {name: peak(side) for name, side in able.items()}
    apart = None
    if row.compared and len(spent) == 2:
        apart = difference(sides[OURS](), sides[row.peer]())
    if row.peer not in sides:
        failed[row.peer] = "not installed"
    return cells(row, spent, held, failed, apart)


def cells(
    row: Row, spent: dict[str, float], held: dict[str, float], failed: dict[str, str], apart: float | None
) -> list[str]:
    """Milliseconds, bytes and errors by side, and the difference, as text."""
    both = row.peer, OURS
    found = [failed.get(name) or f"{spent[name]:.3f} ms" for name in both]
    if len(spent) == 2:
        ratio = spent[row.peer] / spent[OURS] * (row.share() if row.share else 1)
        found += [_report.times(ratio), _report.met(ratio, float(f"{row.floor:.3g}")) if row.floor else ""]
    else:
        found += ["", ""]
    found += [_report.mebibytes(held[name]) if name in held else "" for name in both]
    if row.megabytes and OURS in held:
        found[-1] += f", in MB {_report.met(held[OURS] / 1e6, row.megabytes, most=True)}"
    difference = "" if apart is None else f"{apart:.1g}"
    return [*found, difference if apart is None or apart <= WITHIN else f"**{difference}**"]


def fails(side: Work) -> Exception | None:
    """The error of a side's first call; it compiles."""
    try:
        side()
        torch.cuda.synchronize()
    except Exception as error:
        return error
    return None


def in_turn(sides: dict[str, Work]) -> dict[str, float]:
    """Median milliseconds of each side, measured in turn."""
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            spent[name].append(milliseconds(side))
    return {name: statistics.median(each) for name, each in spent.items()}


def milliseconds(work: Work) -> float:
    """The median time of a call on the device, with its cache emptied before each; a long call is timed once."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    once = (time.perf_counter() - began) * 1e3
    if once >= LONG:
        return once
    from triton.testing import do_bench

    median: Any = do_bench(work, warmup=REPEATED // 2, rep=REPEATED, return_mode="median")
    return median


def peak(work: Work) -> float:
    """Bytes that a call takes above what is there, at the most."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def difference(ours: Any, theirs: Any) -> float:
    """The norm of the difference over that of theirs: of the tensors that both have, the largest."""
    pairs = zip(*(each if isinstance(each, tuple) else (each,) for each in (ours, theirs)), strict=True)
    return max(relative(mine, other) for mine, other in pairs if mine.shape == other.shape)


def relative(mine: Tensor, other: Tensor) -> float:
    """NaN is infinitely far."""
    apart = ((mine.double() - other.double()).norm() / other.double().norm().clamp(min=1e-30)).item()
    return math.inf if math.isnan(apart) else apart
