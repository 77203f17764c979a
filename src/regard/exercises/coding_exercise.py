"""A coding exercise: the file with holes, and how what fills them is marked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..errors import ConfigurationError
from ..steps.wording import Wording, check_language
from ..utils.atomic_files import atomic_write
from .code_mistakes import CodeMistake
from .formula_cases import FormulaCases
from .oracle_cases import OracleCases

HOLE = re.compile(r"^(?P<before>\s*(?:return|[\w, ]+ =)) (?P<solution>.+?)  # hole: (?P<said>.+)$", flags=re.MULTILINE)
FIRST_LINE = "# regard exercise {}"

KOREAN = {
    "the scores of all pairs, (..., M, N)": "모든 쌍의 점수, (..., M, N)",
    "the contexts, (..., M, A)": "문맥 벡터, (..., M, A)",
    "the context in front of the state, (..., M, A + H)": "상태 앞에 문맥 벡터를 이은 것, (..., M, A + H)",
    "the attentional vectors, (..., M, H)": "어텐셔널 은닉 상태, (..., M, H)",
    "of the pairs i = 0, 1, ..., (D / 2,)": "쌍 i = 0, 1, ...의 진동수, (D / 2,)",
    "of all positions and pairs, (N, D / 2)": "모든 위치와 쌍의 각도, (N, D / 2)",
    "sine and cosine of each angle, (N, D / 2, 2)": "각도마다 사인과 코사인, (N, D / 2, 2)",
    "the embeddings with their positions, (..., N, D)": "위치를 더한 임베딩, (..., N, D)",
    "the first features, turned, (..., N, D / 2)": "회전한 첫째 특징, (..., N, D / 2)",
    "the second features, turned, (..., N, D / 2)": "회전한 둘째 특징, (..., N, D / 2)",
    "the rows less their means, (..., N, dim)": "평균을 뺀 행, (..., N, dim)",
    "the variance of each row, (..., N, 1)": "행마다의 분산, (..., N, 1)",
    "the rows of mean 0 and variance 1, (..., N, dim)": "평균 0, 분산 1인 행, (..., N, dim)",
    "the scaled scores, (..., N, N)": "스케일한 점수, (..., N, N)",
    "contexts times W_o, (..., N, dim)": "문맥 벡터에 W_o를 곱한 것, (..., N, dim)",
    "after the attention, (..., N, dim)": "어텐션 다음의 결과, (..., N, dim)",
    "the hidden features, at least 0, (..., N, hidden)": "0 이상인 은닉 특징, (..., N, 은닉 차원)",
    "after the feed-forward network, (..., N, dim)": "피드포워드 신경망 다음의 결과, (..., N, dim)",
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
    """A file with holes, `cases` that mark what was written, and the mistakes that are recognised in a wrong answer."""

    name: str
    title: Wording
    cases: OracleCases | FormulaCases
    mistakes: tuple[CodeMistake, ...] = ()

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
