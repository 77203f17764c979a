"""`regard bench`: the rates by which kernels are chosen, and how well they predict.

A few problems, each computed by every kernel that can in reasonable time: what `regard bench` measures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from torch import Tensor

from regard import biases, explain, masks, scores
from regard.cli.stdio import emit
from regard.kernels import KERNELS
from regard.kernels.calibration import in_turn
from regard.kernels.cost_model import rates

if TYPE_CHECKING:
    from regard.kernels.cost_model import Rates

BUDGET = 1.0
"""Seconds that are spent on each problem, at least, its kernels in turn."""
HOPELESS = 12.0
"""A kernel that is predicted to take so many times as long as the chosen one is not tried."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one problem: seconds as its cost predicts them, and as they were."""

    kernel: str
    predicted: float
    measured: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Trial:
    """One problem, and a row for each kernel that was tried, the one predicted fastest first."""

    problem: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A problem in words and as arguments of `attention`."""

    name: str
    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict


def cases() -> Iterator[Case]:
    """One of each kind: long and short, all pairs and few, decoding, biased, dropped out, additive."""
    window = masks.causal() & masks.window(before=127)
    yield Case("all pairs, n = 64", _dot(1, 8, 64), {})
    yield Case("all pairs, n = 1,024", _dot(1, 8, 1024), {})
    yield Case("causal, n = 1,024", _dot(1, 8, 1024), {"mask": masks.causal()})
    yield Case("causal window of 128, n = 64", _dot(1, 8, 64), {"mask": window})
    yield Case("causal window of 128, n = 2,048", _dot(1, 8, 2048), {"mask": window})
    yield Case("padding, 32 of n = 32", _dot(32, 8, 32), {"mask": masks.padding(lengths=[*range(1, 33)])})
    yield Case("ALiBi, causal, n = 512", _dot(1, 8, 512), {"mask": masks.causal(), "bias": biases.alibi(8)})
    yield Case("dropout, causal, n = 512", _dot(1, 8, 512), {"mask": masks.causal(), "dropout_p": 0.1})
    yield Case("one query, 8,192 keys, 32/8 heads", _dot(1, 32, 8192, queries=1, key_heads=8), {})
    yield Case("additive, n = 128", _dot(1, 1, 128), {"score": scores.Additive(64, 64, 64)})


def trials() -> Iterator[Trial]:
    """Each case, measured."""
    for case in cases():
        with torch.no_grad():
            yield _try(case)


def _try(case: Case) -> Trial:
    plan = explain(*case.tensors, **case.options)
    problem = plan.problem
    predicted = {
        kernel: rates().seconds(kernel.cost(problem), problem.value.dtype)
        for kernel in KERNELS
        if not kernel.why_not(problem)
    }
    within = HOPELESS * min(predicted.values())
    tried = sorted(
        (kernel for kernel in predicted if predicted[kernel] <= within), key=lambda kernel: predicted[kernel]
    )
    measured = in_turn([lambda kernel=kernel: kernel.run(problem) for kernel in tried], BUDGET)
    return Trial(
        case.name,
        tuple(
            Row(kernel.name, predicted[kernel], spent, kernel is plan.kernel)
            for kernel, spent in zip(tried, measured, strict=True)
        ),
    )


def _dot(
    batch: int, heads: int, keys: int, *, queries: int | None = None, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 64 numbers each."""
    few = key_heads or heads
    return (
        torch.rand(batch, heads, queries or keys, 64),
        torch.rand(batch, few, keys, 64),
        torch.rand(batch, few, keys, 64),
    )


def bench(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, about 10 seconds, and keep what was measured.")
    ] = False,
) -> None:
    """Show how the kernels are chosen.

    Prints the rates in use, measured or defaults, and a table of problems and kernels: the time that the rates predict
    and the time that is measured. With --calibrate it measures the rates instead, and keeps them in the user's cache.
    """
    if calibrate:
        _calibrate()
    else:
        _show()


def _calibrate() -> None:
    from regard.kernels.calibration import measure
    from regard.kernels.cost_model import cache_file, folder_for, write

    path = cache_file()
    folder_for(path)  # what is wrong with it is said now, and not after ten seconds
    typer.echo("measuring; other work on this machine would falsify it", err=True)
    measured = measure()
    write(measured, path)
    emit([*_lines(measured), f"written to {path}"])


def _show() -> None:
    from regard.kernels.cost_model import in_use

    used = in_use()
    emit([used.origin, *_lines(used.rates), ""])
    emit([f"{'problem':<34} {'kernel':<12} {'predicted':>10} {'measured':>10} {'ratio':>6}"])
    for trial in trials():
        emit(_rows(trial))


def _lines(rates: Rates) -> list[str]:
    from regard.kernels.cost_model import Machine

    machine = Machine.here()
    return [
        f"  {machine.processor}, threads: {machine.threads}, torch {machine.torch}",
        f"  matrix products  {rates.flops / 1e9:10,.1f} GFLOP/s a thread, float32",
        f"  in native code   {rates.native / 1e9:10,.1f} GFLOP/s a thread",
        f"  passes in cache  {rates.passes / 1e9:10,.2f} G numbers/s a thread",
        f"  main memory      {rates.moved / 1e9:10,.1f} GB/s read",
        f"  new memory       {rates.fresh / 1e9:10,.1f} GB/s handed out",
        f"  a call           {rates.call / 1e-6:10,.2f} µs",
    ]


def _rows(trial: Trial) -> list[str]:
    """A line for each kernel, the chosen one marked."""
    return [
        f"{trial.problem if first else '':<34} {'-> ' if row.chosen else '   '}{row.kernel:<9} "
        f"{row.predicted * 1e3:7.2f} ms {row.measured * 1e3:7.2f} ms {row.predicted / row.measured:6.2f}"
        for first, row in zip([True] + [False] * len(trial.rows), trial.rows, strict=False)
    ]
