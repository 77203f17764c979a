"""Marks of an exercise that computes attention: the cases of `regard.testing`, and the oracle in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention import attention
from ..core.problem import Problem
from ..kernels.base import Result
from ..kernels.validation import make_problem
from ..masks import causal
from ..scores import Additive
from ..testing import Case, make_inputs, measure_agreement

Answer = Callable[[Mapping[str, Any], Problem], Tensor]
"""The output of a problem, computed by the functions of a student's file."""
SMALL = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
"""Queries, keys and values of the example that is shown where an answer is wrong, each times another number."""


@dataclass(frozen=True)
class StudentKernel:
    """An implementation of attention for the suite of `regard.testing`: a student's functions."""

    names: Mapping[str, Any]
    compute: Answer
    name: str = "answer"

    def why_not(self, problem: Problem) -> list[str]:
        """Log-sum-exps are not asked of students."""
        return ["it returns no log-sum-exp"] if problem.wants_lse else []

    def run(self, problem: Problem) -> Result:
        """The output as the student computes it."""
        return Result(tensor_of(self.compute(self.names, problem)))


@dataclass(frozen=True)
class OracleCases:
    """Cases of the suite, and how their problems are computed by the functions of a file."""

    cases: tuple[Case, ...]
    compute: Answer

    def __len__(self) -> int:
        return len(self.cases)

    def faults(self, names: Mapping[str, Any]) -> Iterator[str]:
        """What differs from the oracle, output and gradient, by case."""
        kernel = StudentKernel(names, self.compute)
        for case in self.cases:
            yield from (f"{case.id}: {fault}" for fault in measure_agreement(kernel, case).faults)

    def results(self, names: Mapping[str, Any]) -> Iterator[Tensor]:
        """The output of each case."""
        kernel = StudentKernel(names, self.compute)
        for case in self.cases:
            yield kernel.run(make_inputs(case).problem()).output.detach()

    def example(self, names: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """A small problem of whole numbers: what goes in, what comes out as "yours", and what is "right"."""
        query, key, value = (SMALL * factor for factor in (2, 1, 3))
        query, key, value = (rows.expand(1, 2, 3, 2) for rows in (query, key.flip(0), value.flip(1)))
        options: dict[str, Any] = {"mask": causal()} if self.cases[0].mask == "causal" else {}
        if self.cases[0].score == "additive":
            options["score"] = _unit_score()
        with torch.no_grad():
            problem = make_problem(query, key, value, **options)
            output = StudentKernel(names, self.compute).run(problem).output
            right = attention(query, key, value, kernel="reference", **options)
        shown = {"query": query[0, 0], "key": key[0, 0], "value": value[0, 0]}
        first = output[0, 0] if output.shape == right.shape else output
        return {**shown, "yours": first, "right": right[0, 0]}


def tensor_of(result: object) -> Tensor:
    """The result of a student's function.

    Raises:
        TypeError: no tensor.
    """
    if not isinstance(result, Tensor):
        raise TypeError(f"the result is {result!r}, and no tensor")
    return result


def _unit_score() -> Additive:
    """V · tanh(q + k) with v of ones."""
    score = Additive(2, 2, 2)
    with torch.no_grad():
        for name, parameter in score.named_parameters():
            parameter.copy_(torch.ones(2) if "query" not in name and "key" not in name else torch.eye(2))
    return score
