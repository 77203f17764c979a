"""The coding exercises: the file with holes of each, and how the oracle's problems are computed by what fills them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import AdditivePairs
from ..errors import ConfigurationError, nearest
from ..steps.wording import Wording, check_language
from ..testing import Case
from ..utils.atomic_files import atomic_write

HOLE = re.compile(r"^(?P<before>\s*(?:return|[\w, ]+ =)) (?P<solution>.+?)  # hole: (?P<said>.+)$", flags=re.MULTILINE)
FIRST_LINE = "# regard exercise {}"
Answer = Callable[[Mapping[str, Any], Problem], Tensor]
"""The output of a problem, computed by the functions of a student's file."""

KOREAN = {
    "q_i + k_j of all pairs, (..., M, N, h)": "모든 쌍의 q_i + k_j, (..., M, N, h)",
    "v · tanh of each sum, (..., M, N)": "각 합의 tanh에 v를 내적한 값, (..., M, N)",
    "the scaled scores of all pairs, (..., M, N)": "모든 쌍의 스케일한 점수, (..., M, N)",
    "the weights, of which each row sums to 1": "가중치, 행마다 합이 1",
    "the sum of the values times their weights, (..., M, Dv)": "값에 가중치를 곱해 더한 것, (..., M, Dv)",
    "which keys a query sees, (M, N)": "질의마다 볼 수 있는 키, (M, N)",
    "the scores with the mask": "마스크를 적용한 점수",
    "(..., heads, length, dim)": "(..., 헤드 수, 길이, 차원)",
    "(..., length, heads · dim)": "(..., 길이, 헤드 수 · 차원)",
    "scaled by 1/√d of a head, (..., heads, M, N)": "헤드의 1/√d로 스케일한 점수, (..., 헤드 수, M, N)",
    "the keys of each query head, (..., H, N, d)": "질의 헤드마다의 키, (..., H, N, d)",
    "the values of each query head, (..., H, N, Dv)": "질의 헤드마다의 값, (..., H, N, Dv)",
    "the largest score so far, (..., M, 1)": "지금까지 가장 큰 점수, (..., M, 1)",
    "what older sums are multiplied by, (..., M, 1)": "앞에서 더한 것에 곱하는 수, (..., M, 1)",
    "the exponentials of this tile, (..., M, width)": "이 타일의 지수 함수값, (..., M, width)",
    "the sum of all exponentials so far": "지금까지의 지수 함수값의 합",
    "the sum of values times exponentials so far": "지금까지의 값 × 지수 함수값의 합",
    "the context": "문맥 벡터",
    "the keys of all words so far": "지금까지 모든 단어의 키",
    "the values of all words so far": "지금까지 모든 단어의 값",
    "the context of the new word": "새 단어의 문맥 벡터",
}
"""What the holes say, in Korean."""


@dataclass(frozen=True)
class CodingExercise:
    """A file with holes: `compute` computes a problem by what was written, and `cases` are those of the oracle."""

    name: str
    title: Wording
    cases: tuple[Case, ...]
    compute: Answer

    @property
    def solution(self) -> str:
        """The source without holes."""
        file = resources.files("regard.exercises.solutions") / f"{self.name.replace('-', '_')}_solution.py"
        return file.read_text("utf-8")

    def template(self, language: str = "en") -> str:
        """The source with `...` in the holes, and beside each what it is.

        Raises:
            ConfigurationError: another language than "en" and "ko".
        """
        check_language(language)
        number = 0

        def hole(match: re.Match[str]) -> str:
            nonlocal number
            number += 1
            said = KOREAN[match["said"]] if language == "ko" else match["said"]
            return f"{match['before']} ...  # {number}: {said}"

        return f"{FIRST_LINE.format(self.name)}\n{HOLE.sub(hole, self.solution)}"

    def write(self, path: str | Path, language: str = "en") -> None:
        """Write the file with holes.

        Raises:
            ConfigurationError: the file is there already, or its name does not end in .py.
            CheckpointError: it cannot be written.
        """
        path = Path(path)
        if path.suffix != ".py":
            raise ConfigurationError(f"an exercise is a Python file; {path.name} does not end in .py")
        if path.exists():
            raise ConfigurationError(f"{path} is there already, and may have your answers: name another file")
        text = self.template(language)
        with atomic_write(path) as partial:
            partial.write_text(text, encoding="utf-8")


def coding_exercise(name: str) -> CodingExercise:
    """The exercise of that name.

    Raises:
        ConfigurationError: there is none; the message has the nearest names.

    >>> print(coding_exercise("scaled-dot-product").template().splitlines()[-3])
        scores = ...  # 1: the scaled scores of all pairs, (..., M, N)
    """
    if name not in CODING_EXERCISES:
        raise ConfigurationError(f"there is no coding exercise {name!r}; {nearest(name, CODING_EXERCISES)}")
    return CODING_EXERCISES[name]


def _additive(names: Mapping[str, Any], problem: Problem) -> Tensor:
    pairs = cast(AdditivePairs, problem.pairs)
    scores = names["additive_scores"](pairs.query, pairs.key, pairs.weight)
    return scores.softmax(-1) @ problem.value


def _plain(function: str, *more: int) -> Answer:
    """The function of query, key and value."""
    return lambda names, problem: names[function](problem.pairs.query, problem.pairs.key, problem.value, *more)


def _multi_head(names: Mapping[str, Any], problem: Problem) -> Tensor:
    """The heads beside each other go in, and the result is cut into heads again."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    heads = query.shape[-3]
    rows = (tensor.transpose(-3, -2).flatten(-2) for tensor in (query, key, value))
    joined = names["multi_head"](*rows, heads)
    return joined.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _cache(names: Mapping[str, Any], problem: Problem) -> Tensor:
    """One step for each word, with the cache of the step before."""
    rows, cache = [], None
    for at in range(problem.queries):
        step = (tensor[..., at : at + 1, :] for tensor in (problem.pairs.query, problem.pairs.key, problem.value))
        context, cache = names["decode_step"](*step, cache)
        rows.append(context)
    return torch.cat(rows, -2)


SIZES = tuple(Case(layout=layout, lengths=lengths) for layout in ("2d", "4d") for lengths in ("5x7", "7x5", "1x7"))
_EXERCISES = (
    CodingExercise(
        "additive",
        Wording("Bahdanau's additive scores", "바다나우의 덧셈 스코어"),
        tuple(
            Case(score="additive", layout=layout, lengths=lengths) for layout, lengths in (("2d", "5x7"), ("4d", "7x5"))
        ),
        _additive,
    ),
    CodingExercise(
        "scaled-dot-product",
        Wording("Scaled dot-product attention", "스케일드 닷 프로덕트 어텐션"),
        SIZES,
        _plain("attention"),
    ),
    CodingExercise(
        "causal-mask",
        Wording("Attention under a causal mask", "인과 마스크가 있는 어텐션"),
        tuple(
            Case(mask="causal", layout=layout, lengths=lengths) for layout in ("2d", "4d") for lengths in ("5x5", "5x7")
        ),
        _plain("causal_attention"),
    ),
    CodingExercise(
        "multi-head",
        Wording("Multi-head attention: split, attend, join", "멀티 헤드 어텐션: 나누고, 계산하고, 잇기"),
        tuple(Case(layout="4d", lengths=lengths) for lengths in ("5x7", "7x5", "5x5")),
        _multi_head,
    ),
    CodingExercise(
        "grouped-query",
        Wording("Grouped-query attention", "그룹 질의 어텐션"),
        tuple(Case(layout=layout) for layout in ("grouped", "multiquery", "4d", "5d")),
        _plain("grouped_attention"),
    ),
    CodingExercise(
        "online-softmax",
        Wording("Flash attention's online softmax", "플래시 어텐션의 온라인 소프트맥스"),
        tuple(Case(layout=layout, lengths=lengths) for layout in ("2d", "4d") for lengths in ("5x7", "7x5", "11x29")),
        _plain("tiled_attention", 3),
    ),
    CodingExercise(
        "cache",
        Wording("A step of decoding with a cache", "캐시를 쓰는 디코딩 한 단계"),
        tuple(Case(mask="causal", layout=layout, lengths="5x5") for layout in ("2d", "4d")),
        _cache,
    ),
)
CODING_EXERCISES: Mapping[str, CodingExercise] = {exercise.name: exercise for exercise in _EXERCISES}
"""The coding exercises by name, in the order of the course."""
