"""The tables of `regard bench`: times of each kernel on a few problems; agreement of the kernels with the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import biases, explain, masks, scores
from regard.errors import DeviceError
from regard.kernels import KERNELS, Kernel
from regard.kernels.planning.calibration import time_in_turn
from regard.kernels.planning.rates import predicted_seconds
from regard.testing import Case, cases, long_cases, measure_agreement, suite

BUDGET = 1.0
"""Seconds of measurement per problem, at least; its kernels are timed in turn."""
SLOWEST_TIMED = 12.0
"""A kernel is not timed if its predicted time is this many times that of the chosen one."""


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """Predicted and measured seconds of one kernel on one problem."""

    kernel: str
    predicted: float
    measured: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class ProblemTimings:
    """The timings of one problem, a row for each kernel that was timed, the one predicted fastest first."""

    problem: str
    rows: tuple[KernelTiming, ...]


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """A named problem: the tensors and options of a call of `attention`."""

    name: str
    tensors: tuple[Tensor, Tensor, Tensor]
    options: dict


def benchmark_cases() -> Iterator[BenchmarkCase]:
    """Problems of each kind: long, short, dense, sparse, decoding, with a bias, with dropout, additive."""
    window = masks.causal() & masks.window(before=127)
    yield BenchmarkCase("all pairs, n = 64", _random_tensors(1, 8, 64), {})
    yield BenchmarkCase("all pairs, n = 1,024", _random_tensors(1, 8, 1024), {})
    yield BenchmarkCase("causal, n = 1,024", _random_tensors(1, 8, 1024), {"mask": masks.causal()})
    yield BenchmarkCase("causal window of 128, n = 64", _random_tensors(1, 8, 64), {"mask": window})
    yield BenchmarkCase("causal window of 128, n = 2,048", _random_tensors(1, 8, 2048), {"mask": window})
    yield BenchmarkCase(
        "padding, 32 of n = 32", _random_tensors(32, 8, 32), {"mask": masks.padding(lengths=[*range(1, 33)])}
    )
    yield BenchmarkCase(
        "ALiBi, causal, n = 512", _random_tensors(1, 8, 512), {"mask": masks.causal(), "bias": biases.alibi(8)}
    )
    yield BenchmarkCase(
        "dropout, causal, n = 512", _random_tensors(1, 8, 512), {"mask": masks.causal(), "dropout_p": 0.1}
    )
    yield BenchmarkCase("one query, 8,192 keys, 32/8 heads", _random_tensors(1, 32, 8192, queries=1, key_heads=8), {})
    yield BenchmarkCase("additive, n = 128", _random_tensors(1, 1, 128), {"score": scores.Additive(64, 64, 64)})


def measured_timings() -> Iterator[ProblemTimings]:
    """The timings of every case."""
    for case in benchmark_cases():
        with torch.no_grad():
            yield _timings(case)


def _timings(case: BenchmarkCase) -> ProblemTimings:
    plan = explain(*case.tensors, **case.options)
    problem = plan.problem
    predicted = {
        kernel: predicted_seconds(kernel.cost(problem), problem) for kernel in KERNELS if not kernel.why_not(problem)
    }
    within = SLOWEST_TIMED * min(predicted.values())
    timed = sorted(
        (kernel for kernel in predicted if predicted[kernel] <= within), key=lambda kernel: predicted[kernel]
    )
    measured = time_in_turn([lambda kernel=kernel: kernel.run(problem) for kernel in timed], BUDGET)
    return ProblemTimings(
        case.name,
        tuple(
            KernelTiming(kernel.name, predicted[kernel], spent, kernel is plan.kernel)
            for kernel, spent in zip(timed, measured, strict=True)
        ),
    )


def _random_tensors(
    batch: int, heads: int, keys: int, *, queries: int | None = None, key_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value of 64 features."""
    few = key_heads or heads
    return (
        torch.rand(batch, heads, queries or keys, 64),
        torch.rand(batch, few, keys, 64),
        torch.rand(batch, few, keys, 64),
    )


@dataclass(frozen=True, slots=True)
class KernelAgreement:
    """How many cases a kernel computed, its largest error as a share of the budget, and where; faults by case."""

    kernel: str
    cases: int
    worst: float
    worst_case: str
    faults: tuple[str, ...]


def checked_device(name: str) -> torch.device:
    """The device of that name, which this machine has.

    Raises:
        DeviceError: there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DeviceError(
            f"kernels cannot run on the device {name!r}: {first}. `--device cpu` is on every machine; cuda "
            "needs a GPU and a build of torch for it"
        ) from None
    return device


def measured_agreements(device: torch.device, most: int) -> Iterator[KernelAgreement]:
    """The agreement of each kernel with the oracle, over at most so many of the cases that it admits.

    They are taken evenly from small cases, any two of whose choices occur together, and from long ones.
    """
    admitted: dict[str, list[Case]] = {kernel.name: [] for kernel in KERNELS}
    for kernel, case in suite(KERNELS, among=[*cases(2), *long_cases()], device=device):
        admitted[kernel.name].append(case)
    for kernel in KERNELS:
        among = admitted[kernel.name]
        yield _agreement(kernel, among[:: -(-len(among) // most)] if among else [], device)


def _agreement(kernel: Kernel, among: list[Case], device: torch.device) -> KernelAgreement:
    worst, worst_case, faults = 0.0, "", []
    for case in among:
        try:
            agreement = measure_agreement(kernel, case, device)
        except Exception as error:  # a device may fail in any way, and the other cases are of interest
            share, wrong = float("inf"), (f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}",)
        else:
            share, wrong = agreement.worst, agreement.faults
        faults += [f"{kernel.name} on {case.id}: {fault}" for fault in wrong]
        if share > worst or not worst_case:
            worst, worst_case = share, case.id
    return KernelAgreement(kernel.name, len(among), worst, worst_case, tuple(faults))
