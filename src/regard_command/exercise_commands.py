"""`regard exercise`: coding exercises as files with holes, and their marks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard_command.stdio import emit

if TYPE_CHECKING:
    from torch import Tensor

    from regard.exercises import Verdict
    from regard_doctor import CodeFinding

exercise_commands = typer.Typer(
    help="Code attention yourself: files with holes, marked in float64, with the likely mistake of a wrong answer.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Language = Literal["en", "ko"]
LanguageOption = Annotated[Language, typer.Option("--lang", help="Language of holes and marks.")]

RIGHT = {
    "en": "{}: right: the oracle agrees on all {} cases, forward and gradient",
    "ko": "{}: 맞았습니다. 출력과 기울기가 {}개 문제 모두에서 기준 구현과 일치합니다",
}
HOLES = {
    "en": "{}: still to be filled in: {}",
    "ko": "{}: 아직 채우지 않은 곳이 있습니다: {}",
}
LINE = {"en": "line {}", "ko": "{}행"}
WRONG = {"en": "{}: not right yet: {}", "ko": "{}: 아직 틀렸습니다. {}"}
EXAMPLE = {"en": "A small example:", "ko": "작은 예:"}
NAMES = {
    "en": {"yours": "your result", "right": "the right one"},
    "ko": {
        "query": "질의",
        "key": "키",
        "value": "값",
        "state": "상태",
        "annotations": "인코더의 상태",
        "embeddings": "임베딩",
        "positions": "위치",
        "yours": "제출한 결과",
        "right": "올바른 결과",
    },
}
"""What numbers of an example are called, where it is not the name of the function's argument."""
LIKELY = {"en": "Likely: {}.", "ko": "짐작되는 실수: {}."}
DOCTOR = {"en": "What the doctor sees in it:", "ko": "진단 결과:"}


@exercise_commands.command("list")
def list_exercises(language: LanguageOption = "en") -> None:
    """List the exercises, in the order of the course."""
    # From their file: importing regard would load torch for them.
    file = Path(__file__).parents[1] / "regard" / "exercises" / "exercise_list.json"
    emit(f"{name}: {title[language]}" for name, title in json.loads(file.read_text(encoding="utf-8")).items())


@exercise_commands.command("write")
def write_exercise(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of `regard exercise list`.")],
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="[default: NAME.py]", show_default=False)] = None,
    language: LanguageOption = "en",
) -> None:
    """Write the file of an exercise; its holes are `...`, each with what belongs there."""
    from regard.exercises import coding_exercise

    exercise = coding_exercise(name)
    path = file or Path(f"{name.replace('-', '_')}.py")
    exercise.write(path, language)
    emit([str(path)])


@exercise_commands.command("check")
def check_exercise(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that were filled in; they are run.")],
    language: LanguageOption = "en",
) -> None:
    """Run files, compare them with the formula in float64, and say what is wrong.

    The exit code is 0 if all are right, 1 if one is not, 2 for a file that cannot be read.
    """
    from regard.exercises import check_answer

    verdicts = [check_answer(file) for file in files]
    emit(line for verdict in verdicts for line in _lines(verdict, language))
    if not all(verdict.right for verdict in verdicts):
        raise typer.Exit(1)


def _lines(verdict: Verdict, language: Language) -> list[str]:
    """What is printed of a verdict."""
    if verdict.holes:
        lines = ", ".join(LINE[language].format(line) for line in verdict.holes)
        return [HOLES[language].format(verdict.path, lines)]
    if verdict.fault is None:
        return [RIGHT[language].format(verdict.path, verdict.cases)]
    lines = [WRONG[language].format(verdict.path, verdict.fault)]
    if verdict.example is not None:
        names = NAMES[language]
        shown = (f"  {names.get(name, name)}: {_rounded(numbers)}" for name, numbers in verdict.example.items())
        lines += [EXAMPLE[language], *shown]
    lines += [LIKELY[language].format(said.text(language)) for said in verdict.likely]
    if verdict.findings:
        lines += [DOCTOR[language], *(f"  {_said(finding, language)}" for finding in verdict.findings)]
    return lines


def _said(finding: CodeFinding, language: Language) -> CodeFinding:
    """A finding of the doctor, whose messages are English; in Korean with what its code means."""
    from regard_doctor.code_explanation import explanation

    return finding if language == "en" else replace(finding, message=explanation(finding.code, language).summary)


def _rounded(numbers: Tensor) -> str:
    """The numbers with four digits."""
    if numbers.ndim:
        return f"[{', '.join(map(_rounded, numbers))}]"
    return f"{float(numbers):.4g}"
