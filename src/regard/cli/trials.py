"""A few problems, each computed by every kernel that can in reasonable time: what `regard bench` measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import biases, explain, masks, scores
from regard.kernels import KERNELS
from regard.kernels.calibration import in_turn
from regard.kernels.rates import rates

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
