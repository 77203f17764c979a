"""Coding exercises: files with holes, filled in by a student and marked by the float64 oracle of `regard.testing`.

The command is `regard exercise list|write|check`.
"""

from .answer_check import Verdict as Verdict
from .answer_check import check_answer as check_answer
from .coding_exercise import CODING_EXERCISES as CODING_EXERCISES
from .coding_exercise import CodingExercise as CodingExercise
from .coding_exercise import coding_exercise as coding_exercise

__all__ = ["CODING_EXERCISES", "CodingExercise", "Verdict", "check_answer", "coding_exercise"]
