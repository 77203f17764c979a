"""A student's file: its holes, its numbers against the oracle, and what the doctor says where they are wrong."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..steps.wording import Wording
from .coding_exercise import FIRST_LINE, CodingExercise
from .exercise_list import CODING_EXERCISES, coding_exercise

if TYPE_CHECKING:
    from regard_doctor import CodeFinding


@dataclass(frozen=True)
class Verdict:
    """What a file is: right where `fault` is None; else the fault, its likely cause, and findings of the doctor.

    holes: lines that are not filled in yet. example: a small one, and beside each other what the file makes of it and
    what is right; None where the file raises an error. likely: mistakes that compute the same numbers as the file.
    """

    exercise: CodingExercise
    path: Path
    cases: int = 0
    holes: tuple[int, ...] = ()
    fault: str | None = None
    example: Mapping[str, Tensor] | None = None
    likely: tuple[Wording, ...] = ()
    findings: tuple[CodeFinding, ...] = ()

    @property
    def right(self) -> bool:
        """Whether every case agrees."""
        return self.fault is None and not self.holes


def check_answer(path: str | Path) -> Verdict:
    """Run a file that was filled in, and compare it with the formula in float64, forward and gradient.

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
        if found := next(exercise.cases.faults(names), None):
            wrong = Verdict(exercise, path, fault=found, example=exercise.cases.example(names))
            return _diagnosed(replace(wrong, likely=_likely(exercise, names)), source)
    except Exception as error:  # whatever a student's code raises is its result
        return _diagnosed(Verdict(exercise, path, fault=_said(error, path)), source)
    return Verdict(exercise, path, cases=len(exercise.cases))


def _diagnosed(verdict: Verdict, source: str) -> Verdict:
    """A wrong answer with the doctor's warnings and errors."""
    from regard_doctor import RuleSelection, Severity, diagnose

    findings = diagnose(source, path=str(verdict.path), selection=RuleSelection(least=Severity.WARNING))
    return replace(verdict, findings=tuple(findings))


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


def _likely(exercise: CodingExercise, names: Mapping[str, Any]) -> tuple[Wording, ...]:
    """What was done, where a likely mistake computes the same numbers in all cases."""
    own = list(exercise.cases.results(names))
    return tuple(
        mistake.said
        for mistake in exercise.mistakes
        if all(map(_same, own, exercise.cases.results(mistake.names(exercise.solution))))
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other, 1e-4, 1e-4, equal_nan=True)
