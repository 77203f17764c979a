"""A kernel's comparison with the reference on a small problem, at its first use on a device, and the memory of it.

Code that is compiled for a device can be wrong on that device alone. What agreed is stored in the user's cache
directory, by device, version of torch and features of the problem; what disagreed is known to this process alone, so
that a mended installation is tried again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ... import biases, masks
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...errors import RegardError
from ...utils.atomic_files import atomic_write
from ..base import Result
from ..formula import formula
from .rates import cache_file

LENGTH, FEW, WINDOW = 600, 5, 400
"""Keys of the small problem, its queries where the problem has few, and the distance that its mask allows: its tiles of
128 are empty, partial and full, and the last ones smaller."""
FEW_QUERIES = 128
"""Fewer queries than these are computed by code of their own in FlexAttention."""
ROUNDINGS = 8.0
"""The error allowed, in roundings of the dtype at the largest number, beside that of the formula in the dtype."""
FORMULA_ERRORS = 4.0
"""The error allowed, in errors of the formula in the dtype."""

Run = Callable[[Problem], Result]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest error of a result, and the error that is allowed."""

    of: str
    error: float
    budget: float

    @property
    def agrees(self) -> bool:
        """Whether the error is within the budget; NaN is not."""
        return self.error <= self.budget


class SelfCheck:
    """The features for which a kernel was compared with the reference, and the reasons against those that disagreed.

    path: the file of what agreed, a function, as the cache directory may change.
    """

    def __init__(self, run: Run, path: Callable[[], Path]) -> None:
        self.run, self.path = run, path
        self._agreed: set[str] = set()
        self._reasons: dict[str, str] = {}

    def reason(self, problem: Problem) -> str:
        """The reason against a problem with these features; empty if they agreed, or were never compared."""
        return self._reasons.get(features(problem), "") if self._reasons else ""

    def passes(self, problem: Problem) -> bool:
        """Whether the kernel agrees with the reference for these features: compared once, then remembered."""
        key = features(problem)
        if key in self._agreed:
            return True
        if key in self._reasons:
            return False
        if key in (stored := _load(self.path)):
            self._agreed |= stored.keys()
            return True
        try:
            worst = compare(self.run, small_problem(problem))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything
            first = (str(error).strip() or "no message").splitlines()[0]
            self._reasons[key] = f"it fails on a small problem ({key}): {type(error).__name__}: {first}"
            return False
        if not worst.agrees:
            self._reasons[key] = (
                f"it disagrees with the reference on a small problem ({key}): the {worst.of} is wrong by "
                f"{worst.error:.2g}, where {worst.budget:.2g} is allowed"
            )
            return False
        self._agreed.add(key)
        _store(self.path, key, worst)
        return True


def features(problem: Problem) -> str:
    """What decides which code a device runs: the device, torch's version, dtype, dims, groups, options, gradients."""
    device, value = problem.value.device, problem.value
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    heads, key_heads = (value.shape[-3], problem.pairs.key.shape[-3]) if problem.heads else (1, 1)
    query_heads = problem.pairs.query.shape[-3] if problem.heads else heads
    dims = f"{problem.pairs.query.shape[-1]} and {value.shape[-1]} features"
    parts = [name, f"torch {torch.__version__}", str(value.dtype).removeprefix("torch."), dims]
    parts += [f"{query_heads // max(key_heads, 1)} heads a group"] if query_heads != key_heads else []
    parts += ["few queries"] if problem.queries < FEW_QUERIES else []
    parts += ["softcap"] if problem.softcap is not None else []
    parts += [] if problem.bias is None else ["learned bias" if problem.bias_requires_grad() else "bias"]
    parts += ["gradient"] if problem.requires_grad() else []
    return ", ".join(parts)


def small_problem(problem: Problem) -> Problem:
    """A small problem of the same features: a window, documents, a bias by distance and one of keys; always the same.

    Shapes: query (2, group, 600 or 5, D), key (2, 1, 600, D), value (2, 1, 600, Dv).
    """
    value, generator = problem.value, torch.Generator().manual_seed(0)
    group = problem.pairs.query.shape[-3] // problem.pairs.key.shape[-3] if problem.heads else 1
    gradient = problem.requires_grad()

    def drawn(*shape: int, learned: bool = gradient) -> Tensor:
        tensor = torch.randn(shape, generator=generator, device="cpu").to(value.device, value.dtype)
        return tensor.requires_grad_() if learned else tensor

    dim, queries = problem.pairs.query.shape[-1], FEW if problem.queries < FEW_QUERIES else LENGTH
    query, key = drawn(2, group, queries, dim), drawn(2, 1, LENGTH, dim)
    bias = None
    if problem.bias is not None:
        learned = problem.bias_requires_grad()
        bias = biases.clipped(drawn(group, 65, learned=learned), before=32, after=32)
        bias = bias + biases.tensor(drawn(group, 1, LENGTH, learned=learned))
    documents = masks.documents(torch.arange(LENGTH, device=value.device) // 450)
    return Problem(
        pairs=replace(cast(DotPairs, problem.pairs), query=query, key=key),
        value=drawn(2, 1, LENGTH, value.shape[-1]),
        mask=masks.causal() & masks.window(before=WINDOW) & documents,
        bias=bias,
        softcap=problem.softcap,
        wants_lse=True,
    )


def compare(run: Run, problem: Problem) -> Deviation:
    """The worst deviation of a kernel's output, log-sum-exp and gradients from the formula in float64."""
    with torch.inference_mode(False):
        truth, approximation = _results(formula, _in_float64(problem)), _results(formula, problem)
        results = _results(run, problem)
    rounding = torch.finfo(problem.value.dtype).eps
    deviations = []
    for name, true in truth.items():
        error, allowed = _largest(results[name], true), _largest(approximation[name], true)
        budget = FORMULA_ERRORS * allowed + ROUNDINGS * rounding * float(true.abs().max())
        deviations.append(Deviation(name, error, budget))
    return max(deviations, key=lambda each: float("inf") if each.error != each.error else each.error / each.budget)


def _results(run: Run, problem: Problem) -> dict[str, Tensor]:
    """Output, log-sum-exp, and the gradients of a fixed sum of both, by name."""
    named = {"query": problem.pairs.query, "key": problem.pairs.key, "value": problem.value}
    if problem.bias is not None:
        named |= {f"bias parameter {number}": tensor for number, tensor in enumerate(problem.bias.parameters())}
    leaves = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    with torch.enable_grad():
        result = run(problem)
        results = {"output": result.output, "log-sum-exp": cast(Tensor, result.lse)}
        if leaves:
            upstream = [
                torch.linspace(-1, 1, each.numel(), device=each.device).view_as(each) for each in results.values()
            ]
            total = sum((each * above).sum() for each, above in zip(results.values(), upstream, strict=True))
            gradients = torch.autograd.grad(cast(Tensor, total), list(leaves.values()))
            results |= {f"gradient of {name}": each for name, each in zip(leaves, gradients, strict=True)}
    return {name: each.detach() for name, each in results.items()}


def _in_float64(problem: Problem) -> Problem:
    def widened(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_(tensor.requires_grad)

    bias = problem.bias
    return replace(
        problem,
        pairs=replace(problem.pairs, query=widened(problem.pairs.query), key=widened(problem.pairs.key)),
        value=widened(problem.value),
        bias=None if bias is None else bias.with_parameters([widened(tensor) for tensor in bias.parameters()]),
    )


def _largest(tensor: Tensor, truth: Tensor) -> float:
    """The largest difference; NaN where one of both is."""
    return float((tensor.double() - truth).abs().max())


def check_file() -> Path:
    """Path of what agreed: self_checks.json in regard's folder of the user's cache directory."""
    return cache_file().with_name("self_checks.json")


def _load(path: Callable[[], Path]) -> dict[str, dict[str, float]]:
    """What is stored; nothing where the file is missing, damaged or closed to us."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        stored = json.loads(path().read_text("utf-8"))
        return stored if isinstance(stored, dict) else {}
    return {}


def _store(path: Callable[[], Path], key: str, worst: Deviation) -> None:
    """Add what agreed to the file; a folder that cannot be written to is no reason to fail."""
    with contextlib.suppress(OSError, RuntimeError, RegardError):
        path().parent.mkdir(parents=True, exist_ok=True)
        stored = _load(path) | {key: {"error": worst.error, "budget": worst.budget}}
        with atomic_write(path()) as partial:
            partial.write_text(json.dumps(stored, indent=2) + "\n", "utf-8")
