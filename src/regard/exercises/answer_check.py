"""A student's file: its holes, its numbers against the oracle, and what the doctor says where they are wrong."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import attention
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels.base import Result
from ..kernels.validation import make_problem
from ..masks import causal
from ..scores import Additive
from ..testing import measure_agreement
from .coding_exercise import CODING_EXERCISES, FIRST_LINE, CodingExercise, coding_exercise

if TYPE_CHECKING:
    from regard_doctor import CodeFinding

SMALL = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
"""Queries, keys and values of the example that is shown where an answer is wrong, each times another number."""


@dataclass(frozen=True)
class Verdict:
    """What a file is: right where `fault` is None; else the fault, a small example, and findings of the doctor.

    holes: lines that are not filled in yet. example: query, key, value, and beside each other what the file makes of
    them and what is right; empty where the file raises an error.
    """

    exercise: CodingExercise
    path: Path
    cases: int = 0
    holes: tuple[int, ...] = ()
    fault: str | None = None
    example: Mapping[str, Tensor] | None = None
    findings: tuple[CodeFinding, ...] = ()

    @property
    def right(self) -> bool:
        """Whether every case of the oracle agrees."""
        return self.fault is None and not self.holes


@dataclass(frozen=True)
class StudentKernel:
    """An implementation of attention for the suite of `regard.testing`: a student's functions."""

    exercise: CodingExercise
    names: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the exercise."""
        return self.exercise.name

    def why_not(self, problem: Problem) -> list[str]:
        """Log-sum-exps are not asked of students."""
        return ["it returns no log-sum-exp"] if problem.wants_lse else []

    def run(self, problem: Problem) -> Result:
        """The output as the student computes it."""
        output = self.exercise.compute(self.names, problem)
        if not isinstance(output, Tensor):
            raise TypeError(f"the result is {output!r}, and no tensor")
        return Result(output)


def check_answer(path: str | Path) -> Verdict:
    """Run a file that was filled in, and compare it with the oracle in float64, forward and gradient.

    The file is executed, as `python FILE` would.

    Raises:
        ConfigurationError: it cannot be read, is no Python, or is none of the exercises; the message says which line.
    """
    path = Path(path)
    source = _source(path)
    exercise = _exercise_of(path, source)
    tree = _parsed(path, source)
    if holes := _holes(tree):
        return Verdict(exercise, path, holes=holes)
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(tree, str(path), "exec"), names)
        kernel = StudentKernel(exercise, names)
        for case in exercise.cases:
            if faults := measure_agreement(kernel, case).faults:
                return _wrong(exercise, path, f"{case.id}: {faults[0]}", source, _example(kernel))
    except Exception as error:  # whatever a student's code raises is its result
        return _wrong(exercise, path, _said(error, path), source, None)
    return Verdict(exercise, path, cases=len(exercise.cases))


def _wrong(
    exercise: CodingExercise, path: Path, fault: str, source: str, example: Mapping[str, Tensor] | None
) -> Verdict:
    """The verdict on a wrong answer, with the doctor's warnings and errors."""
    from regard_doctor import RuleSelection, Severity, diagnose

    findings = diagnose(source, path=str(path), selection=RuleSelection(least=Severity.WARNING))
    return Verdict(exercise, path, fault=fault, example=example, findings=tuple(findings))


def _source(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8: save it so") from None


def _exercise_of(path: Path, source: str) -> CodingExercise:
    """The exercise that the first line names."""
    first = source.partition("\n")[0].strip()
    start = FIRST_LINE.format("")
    if not first.startswith(start):
        raise ConfigurationError(
            f"{path} begins with {first!r}; an exercise begins with {FIRST_LINE.format('NAME')!r}, one of "
            f"{', '.join(CODING_EXERCISES)}: leave that line as `regard exercise write` made it"
        )
    return coding_exercise(first.removeprefix(start).strip())


def _parsed(path: Path, source: str) -> ast.Module:
    try:
        return ast.parse(source, str(path))
    except SyntaxError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: {error.msg}: mend it, and check again") from None


def _holes(tree: ast.Module) -> tuple[int, ...]:
    """The lines whose value is still `...`."""
    statements = (node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.Return)))
    return tuple(
        sorted(
            node.lineno for node in statements if isinstance(node.value, ast.Constant) and node.value.value is Ellipsis
        )
    )


def _said(error: Exception, path: Path) -> str:
    """An error with the line of the student's file that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


def _example(kernel: StudentKernel) -> Mapping[str, Tensor]:
    """A small problem of whole numbers: what goes in, what comes out, and what is right."""
    query, key, value = (SMALL * factor for factor in (2, 1, 3))
    query, key, value = (rows.expand(1, 2, 3, 2) for rows in (query, key.flip(0), value.flip(1)))
    options: dict[str, Any] = {"mask": causal()} if kernel.exercise.cases[0].mask == "causal" else {}
    if kernel.exercise.cases[0].score == "additive":
        options["score"] = _unit_score()
    with torch.no_grad():
        problem = make_problem(query, key, value, **options)
        output = kernel.run(problem).output
        right = attention(query, key, value, kernel="reference", **options)
    shown = {"query": query[0, 0], "key": key[0, 0], "value": value[0, 0]}
    first = output[0, 0] if output.shape == right.shape else output
    return {**shown, "yours": first, "right": right[0, 0]}


def _unit_score() -> Additive:
    """V · tanh(q + k) with v of ones."""
    score = Additive(2, 2, 2)
    with torch.no_grad():
        for name, parameter in score.named_parameters():
            parameter.copy_(torch.ones(2) if "query" not in name and "key" not in name else torch.eye(2))
    return score
