"""Coding exercises: files with holes, filled in by a student and marked in float64.

The command is `regard exercise list|write|check`.
"""

from .answer_check import Verdict as Verdict
from .answer_check import check_answer as check_answer
from .coding_exercise import CodingExercise as CodingExercise
from .exercise_list import CODING_EXERCISES as CODING_EXERCISES
from .exercise_list import coding_exercise as coding_exercise

__all__ = ["CODING_EXERCISES", "CodingExercise", "Verdict", "check_answer", "coding_exercise"]
