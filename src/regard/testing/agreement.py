"""The agreement suite: compare a kernel's results and gradients with the oracle's on every case that it supports.

What is tested need not be one of the library's kernels, nor softmax attention: anything with a `name`, `why_not` and
`run` is run through the same cases, and held to the oracle of its normalizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..core.problem import Problem
from ..kernels import KERNELS, Result
from .case_inputs import Inputs, make_inputs
from .cases import Case, cases
from .oracle import SOFTMAX, Oracle, OracleResult, upstream_gradients
from .tolerance import Expected, compare


class Implementation(Protocol):
    """Protocol of a subject of the suite: a kernel, or another implementation of attention.

    An attribute `exponential` declares how far, relatively, its exponentials are from correctly rounded ones.
    """

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    def why_not(self, problem: Problem) -> list[str]:
        """The reasons why it cannot compute the problem; empty if it can."""
        ...

    def run(self, problem: Problem) -> Result:
        """The result; only called where `why_not` is empty."""
        ...


AnyImplementation = TypeVar("AnyImplementation", bound=Implementation)


def suite(
    implementations: Iterable[AnyImplementation] = KERNELS,
    *,
    strength: int = 3,
    among: Iterable[Case] | None = None,
    device: str | torch.device = "cpu",
    with_lse: bool = False,
    oracle: Oracle = SOFTMAX,
) -> Iterator[tuple[AnyImplementation, Case]]:
    """Pairs of an implementation and a case that it admits, the arguments of `assert_agrees`.

    Any `strength` choices of score, mask, bias, layout, lengths, dtype and so on are combined in some case (see
    `cases`); `among` replaces the cases, by `long_cases()` or `random_cases(1000)` for example. `with_lse` admits only
    cases whose log-sum-exp can be returned. The problems have the normalizer of `oracle`.

    >>> from regard.testing import suite
    >>> kernel, case = next(suite(strength=1))
    >>> kernel.name, case.id
    ('sdpa', 'default-2d-5x7-float32')
    """
    implementations = tuple(implementations)
    for case in cases(strength) if among is None else among:
        inputs, normalizer = make_inputs(case, device), oracle.normalizer
        if normalizer is not None and normalizer.refused(inputs.problem()):
            continue
        problem = inputs.problem(wants_lse=with_lse, normalizer=normalizer)
        yield from ((one, case) for one in implementations if not one.why_not(problem))


def assert_agrees(
    implementation: Implementation, case: Case, device: str | torch.device = "cpu", *, oracle: Oracle = SOFTMAX
) -> None:
    """Compute a case by an implementation, and compare the result with the oracle's.

    Checked, with and without the log-sum-exp if it can be returned: the output, the log-sum-exp, the gradients of
    query, key, value, bias, sinks and the score's parameters, each within its tolerance. Rows without keys are exactly
    0, with log-sum-exp -inf (if there is no sink) and gradient 0; keys and values that no query attends to have
    gradient exactly 0, whatever their numbers are. Rows that attend to NaN or infinity are not finite, and no other row
    is affected.

    Raises:
        AssertionError: the message lists every fault.
    """
    if faults := measure_agreement(implementation, case, device, oracle=oracle).faults:
        raise AssertionError("\n".join([f"kernel {implementation.name!r} is wrong on the case {case.id}:", *faults]))


@dataclass(frozen=True, slots=True)
class CaseAgreement:
    """The faults of an implementation on a case, and the largest error of a tensor as a share of its budget.

    worst: at most 1 where there are no faults; infinite where a shape, dtype, NaN or infinity differs.
    """

    faults: tuple[str, ...]
    worst: float


def measure_agreement(
    implementation: Implementation, case: Case, device: str | torch.device = "cpu", *, oracle: Oracle = SOFTMAX
) -> CaseAgreement:
    """The result of the comparisons of `assert_agrees`; gradients are computed only if the output is right.

    >>> from regard.kernels.reference import ReferenceKernel
    >>> measure_agreement(ReferenceKernel(), Case()).worst < 1
    True
    """
    inputs = make_inputs(case, device)
    plain, with_lse = (inputs.problem(wants_lse=wanted, normalizer=oracle.normalizer) for wanted in (False, True))
    has_lse = with_lse.has_lse and not implementation.why_not(with_lse)
    exponential = getattr(implementation, "exponential", 0.0)
    comparison = _Comparison(inputs, _expected_results(case, has_lse, oracle), has_lse, exponential)
    faults = []
    if not implementation.why_not(plain):
        faults = comparison.output_faults(implementation.run(plain).output)
    if not faults:
        faults = comparison.faults(implementation.run(with_lse if has_lse else plain))
    return CaseAgreement(tuple(faults), max(comparison.shares, default=math.inf if faults else 0.0))


@dataclass(frozen=True, eq=False)
class _ExpectedResults:
    """The oracle's truth of a case, and its approximations in the working precision."""

    truth: OracleResult
    approximations: Sequence[OracleResult]


# Neighbouring tests run one case through one kernel after the other, and a suite is run several times.
@lru_cache(maxsize=512)
def _expected_results(case: Case, with_lse: bool, oracle: Oracle) -> _ExpectedResults:
    inputs = make_inputs(case)
    truth = oracle.truth(inputs, with_lse=with_lse)
    return _ExpectedResults(truth, list(oracle.approximations(inputs, truth, with_lse=with_lse)))


@dataclass(frozen=True, eq=False)
class _Comparison:
    """A result of an implementation against the expected ones; `shares` are the errors, as shares of their budgets.

    The relative error of an exponential enters the log of a sum once, and a weight twice, in its numerator and in the
    sum. It enters a gradient four times: in the weight, and in the output that the gradient contains.
    """

    inputs: Inputs
    expected: _ExpectedResults
    with_lse: bool
    exponential: float
    shares: list[float] = field(default_factory=list)

    def fault(self, actual: Tensor, expected: Expected) -> str | None:
        """What is wrong with a tensor; its error as a share of the budget is added to `shares`."""
        error = compare(actual, expected)
        self.shares.append(error.share)
        return error.fault

    def faults(self, result: Result) -> list[str]:
        """All faults of a result and of its gradients; those of the gradients if the result is right."""
        results = [result.output]
        if self.with_lse:
            if result.lse is None:
                return ["lse: there is none, and it was wanted"]
            results.append(result.lse)
        faults = self.output_faults(result.output)
        if result.lse is not None:
            faults += self.lse_faults(result.lse)
        if faults:
            return faults
        upstream = upstream_gradients(self.inputs, self.expected.truth.output)
        upstream = [gradient.to(tensor) for gradient, tensor in zip(upstream, results, strict=False)]
        leaves = self.inputs.leaves
        gradients = torch.autograd.grad(
            results, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
        )
        return self.gradient_faults(dict(zip(leaves, gradients, strict=True)))

    def output_faults(self, output: Tensor) -> list[str]:
        truth = self.expected.truth
        expected = Expected(
            _infinity_as_nan(truth.output),
            self.inputs.leaves["value"].dtype,
            [result.output for result in self.expected.approximations],
            exponential=2 * self.exponential,
        )
        if text := self.fault(_infinity_as_nan(output), expected):
            return [f"output: {text}"]
        empty = ~self.inputs.keep.any(-1).reshape(truth.lse.shape)
        return [] if (output.cpu()[empty] == 0).all() else ["output: a row that attends to nothing is not exactly 0"]

    def lse_faults(self, lse: Tensor) -> list[str]:
        """In float32 at least, with magnitude 1: a relative error of the sum is an absolute one of its log."""
        dtype = torch.promote_types(self.inputs.leaves["value"].dtype, torch.float32)
        approximations = [result.lse for result in self.expected.approximations]
        truth = _infinity_as_nan(self.expected.truth.lse)
        text = self.fault(_infinity_as_nan(lse), Expected(truth, dtype, approximations, 1.0, self.exponential))
        return [f"lse: {text}"] if text else []

    def gradient_faults(self, gradients: dict[str, Tensor]) -> list[str]:
        inputs, truth = self.inputs, self.expected.truth
        attends_to_non_finite = inputs.case.poison in ("query", "key", "value")
        # A gradient may be a difference that cancels; its terms are as large as the other gradients.
        sizes = [gradient.abs().mean().item() for gradient in truth.gradients.values() if gradient.isfinite().all()]
        magnitude = max((size for size in sizes if size == size), default=0.0)
        faults = []
        for name, gradient in gradients.items():
            # NaN that is attended to may be in every gradient but those of the queries whose rows are finite.
            if attends_to_non_finite and name != "query":
                continue
            compared = gradient, truth.gradients[name], *(one.gradients[name] for one in self.expected.approximations)
            if attends_to_non_finite:
                finite = inputs.entries_of_rows("query", truth.output.isfinite().all(-1))
                compared = tuple(torch.where(finite.to(tensor.device), tensor, 0.0) for tensor in compared)
            gradient, true, *approximations = compared
            dtype = inputs.leaves["value"].dtype
            if text := self.fault(gradient, Expected(true, dtype, approximations, magnitude, 4 * self.exponential)):
                faults.append(f"gradient of {name}: {text}")
            elif name in ("query", "key", "value") and not (gradient.cpu()[~inputs.attended_entries(name)] == 0).all():
                faults.append(f"gradient of {name}: it is not exactly 0 where nothing is attended to")
        return faults


def _infinity_as_nan(tensor: Tensor) -> Tensor:
    """Infinity as NaN: a row that attends to infinity may have either; -inf stays."""
    return tensor.masked_fill(tensor == torch.inf, torch.nan)
