"""Mistakes that are often made in the coding exercises: changes of a solution, recognised by what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..steps.wording import Wording


@dataclass(frozen=True)
class CodeMistake:
    """A sentence that says what was done, and the solution of whoever does it: texts and what stands in their place."""

    said: Wording
    changes: tuple[tuple[str, str], ...]

    def names(self, solution: str) -> Mapping[str, Any]:
        """What the changed solution defines."""
        for before, after in self.changes:
            solution = solution.replace(before, after)
        names: dict[str, Any] = {}
        exec(compile(f"import math, torch\n{solution}", "a mistake", "exec"), names)
        return names


def _mistake(en: str, ko: str, *changes: tuple[str, str]) -> CodeMistake:
    return CodeMistake(Wording(en, ko), changes)


_UNSCALED = _mistake(
    "the scores were not scaled by 1/√d", "점수를 √d로 나누지 않았습니다", (" / math.sqrt(query.shape[-1])", "")
)
_WRONG_AXIS = _mistake(
    "softmax over the wrong axis: the columns sum to 1, and not the rows",
    "소프트맥스의 축이 틀렸습니다. 행이 아니라 열의 합이 1입니다",
    ("softmax(dim=-1)", "softmax(dim=-2)"),
)
_RISING = _mistake(
    "the exponent is 2i / D, and has to be -2i / D: the frequencies fall",
    "지수가 2i / D인데 -2i / D여야 합니다. 진동수는 작아집니다",
    ("(-torch.arange", "(torch.arange"),
)

CODE_MISTAKES: Mapping[str, tuple[CodeMistake, ...]] = {
    "additive": (
        _mistake("the tanh was left out", "tanh를 빠뜨렸습니다", ("sums.tanh()", "sums")),
        _mistake(
            "the tanh stands around v · (q + k), and belongs inside",
            "tanh를 v와의 내적 다음에 썼습니다. 내적 앞에 있어야 합니다",
            ("sums.tanh() @ weight", "(sums @ weight).tanh()"),
        ),
    ),
    "luong": (
        _WRONG_AXIS,
        _mistake(
            "the scores were scaled by 1/√H, which Luong's are not",
            "점수를 √H로 나누었습니다. 루옹의 점수는 나누지 않습니다",
            ("annotations.mT  #", "annotations.mT / math.sqrt(state.shape[-1])  #"),
        ),
        _mistake(
            "the state stands in front of the context",
            "상태를 문맥 벡터 앞에 이었습니다",
            ("[context, state]", "[state, context]"),
        ),
        _mistake("the tanh was left out", "tanh를 빠뜨렸습니다", ("(both @ combine.mT).tanh()", "both @ combine.mT")),
    ),
    "scaled-dot-product": (
        _UNSCALED,
        _mistake(
            "the scores were divided by d, and not by √d",
            "점수를 √d가 아니라 d로 나누었습니다",
            ("math.sqrt(query.shape[-1])", "query.shape[-1]"),
        ),
        _WRONG_AXIS,
        _mistake(
            "the exponentials were not divided by their sum",
            "지수 함수값을 합으로 나누지 않았습니다",
            ("scores.softmax(dim=-1)", "scores.exp()"),
        ),
    ),
    "causal-mask": (
        _mistake(
            "the mask was read the wrong way round: True means attend",
            "마스크를 거꾸로 읽었습니다. True가 '참조'입니다",
            ("~keep", "keep"),
        ),
        _mistake(
            "query i is at position i + N - M; here it was at i",
            "질의 i의 위치는 i + N - M인데 i로 보았습니다",
            ("tril(keys - queries)", "tril()"),
        ),
        _mistake(
            "a query did not see its own key",
            "질의가 자기 위치의 키를 보지 못합니다",
            ("tril(keys - queries)", "tril(keys - queries - 1)"),
        ),
        _mistake("a masked score is 0, and not -∞", "가려진 점수를 -∞가 아니라 0으로 두었습니다", ("-math.inf", "0.0")),
        _mistake("the mask was not applied", "마스크를 적용하지 않았습니다", (".masked_fill(~keep, -math.inf)", "")),
    ),
    "multi-head": (
        _mistake(
            "the scores were scaled by 1/√(heads · d), the dim of the model, and not of a head",
            "점수를 헤드의 차원이 아니라 모델의 차원(헤드 수 · d)의 제곱근으로 나누었습니다",
            ("math.sqrt(query.shape[-1])", "math.sqrt(heads * query.shape[-1])"),
        ),
        _UNSCALED,
        _mistake(
            "a head has neighbouring features; here it had every other one",
            "헤드는 이웃한 특징으로 되어 있는데, 하나씩 건너뛰며 가져왔습니다",
            ("unflatten(-1, (heads, -1)).transpose(-3, -2)", "unflatten(-1, (-1, heads)).movedim(-1, -3)"),
        ),
        _mistake(
            "the rows were cut into heads by their memory, without a transposition: words and features are mixed",
            "전치하지 않고 reshape로 헤드를 나누어 단어와 특징이 섞였습니다",
            (
                "rows.unflatten(-1, (heads, -1)).transpose(-3, -2)",
                "rows.reshape(*rows.shape[:-2], heads, rows.shape[-2], -1)",
            ),
        ),
        _mistake(
            "the heads were joined by their memory, without a transposition: words and features are mixed",
            "전치하지 않고 reshape로 헤드를 이어 단어와 특징이 섞였습니다",
            ("rows.transpose(-3, -2).flatten(-2)", "rows.reshape(*rows.shape[:-3], rows.shape[-2], -1)"),
        ),
    ),
    "grouped-query": (
        _mistake(
            "neighbouring query heads share a head of keys; here the heads of keys took turns",
            "이웃한 질의 헤드가 키 헤드 하나를 함께 쓰는데, 키 헤드를 번갈아 썼습니다",
            ("repeat_interleave(group, dim=-3)", "tile(group, 1, 1)"),
        ),
    ),
    "online-softmax": (
        _mistake(
            "the older sum of exponentials was not shrunk to the new maximum",
            "앞에서 더한 지수 함수값의 합을 새 최댓값에 맞추어 줄이지 않았습니다",
            ("shrink * total", "total"),
        ),
        _mistake(
            "the older sum of values was not shrunk to the new maximum",
            "앞에서 더한 값의 합을 새 최댓값에 맞추어 줄이지 않았습니다",
            ("shrink * summed", "summed"),
        ),
        _mistake(
            "the sum of values was not divided by the sum of exponentials",
            "값의 합을 지수 함수값의 합으로 나누지 않았습니다",
            ("summed / total", "summed"),
        ),
    ),
    "cache": (
        _mistake(
            "the new key and the new value stand at different ends of the cache: words have the values of others",
            "새 키와 새 값을 서로 다른 쪽에 이어서 키와 값의 짝이 어긋났습니다",
            ("[cache[1], value]", "[value, cache[1]]"),
        ),
    ),
    "sinusoidal": (
        _mistake(
            "the exponent is -i / D, and has to be -2i / D",
            "지수가 -i / D인데 -2i / D여야 합니다",
            ("torch.arange(0, dim, 2)", "torch.arange(dim // 2)"),
        ),
        _RISING,
        _mistake(
            "the sines stand in front of the cosines; they have to take turns",
            "사인을 모두 앞에, 코사인을 뒤에 두었습니다. 번갈아 놓아야 합니다",
            ("pairs.flatten(-2)", "pairs.mT.flatten(-2)"),
        ),
        _mistake(
            "cosine and sine are exchanged",
            "사인과 코사인이 서로 바뀌었습니다",
            ("[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]"),
        ),
        _mistake(
            "positions were counted from 1, not from 0",
            "위치를 0이 아니라 1부터 셌습니다",
            ("positions[:, None]", "(positions[:, None] + 1)"),
        ),
    ),
    "rotary": (
        _mistake(
            "the exponent is -i / D, and has to be -2i / D",
            "지수가 -i / D인데 -2i / D여야 합니다",
            ("torch.arange(half) / half", "torch.arange(half) / rows.shape[-1]"),
        ),
        _RISING,
        _mistake(
            "turned in the other direction",
            "반대 방향으로 회전했습니다",
            ("- second * angles.sin()", "+ second * angles.sin()"),
            ("first * angles.sin() + second", "-first * angles.sin() + second"),
        ),
        _mistake(
            "no rotation: the minus of the first features is missing",
            "첫째 특징의 빼기가 더하기로 되어 있어 회전이 아닙니다",
            ("- second * angles.sin()", "+ second * angles.sin()"),
        ),
        _mistake(
            "sine and cosine are exchanged",
            "사인과 코사인이 서로 바뀌었습니다",
            ("first * angles.cos() - second * angles.sin()", "first * angles.sin() - second * angles.cos()"),
            ("first * angles.sin() + second * angles.cos()", "first * angles.cos() + second * angles.sin()"),
        ),
    ),
    "transformer-block": (
        _mistake(
            "the attention has no residual path",
            "어텐션에 잔차 연결이 없습니다",
            ("norm(x + attend(x, query, key, value, output))", "norm(attend(x, query, key, value, output))"),
        ),
        _mistake(
            "the feed-forward network has no residual path",
            "피드포워드 신경망에 잔차 연결이 없습니다",
            ("norm(x + hidden @ down)", "norm(hidden @ down)"),
        ),
        _mistake(
            "the norm is of f(x) alone, and has to be of x + f(x)",
            "f(x)만 정규화했습니다. x + f(x)를 정규화해야 합니다",
            ("norm(x + attend(x, query, key, value, output))", "x + norm(attend(x, query, key, value, output))"),
            ("norm(x + hidden @ down)", "x + norm(hidden @ down)"),
        ),
        _mistake(
            "pre-norm, x + f(norm(x)); the block here is norm(x + f(x))",
            "x + f(norm(x))로 계산했습니다. 여기의 블록은 norm(x + f(x))입니다",
            ("norm(x + attend(x, query, key, value, output))", "x + attend(norm(x), query, key, value, output)"),
            ("(x @ up)", "(norm(x) @ up)"),
            ("norm(x + hidden @ down)", "x + hidden @ down"),
        ),
        _mistake(
            "the variance was divided by dim - 1, and not by dim",
            "분산을 dim이 아니라 dim - 1로 나누었습니다",
            ("centred.square().mean(dim=-1, keepdim=True)", "rows.var(dim=-1, keepdim=True)"),
        ),
        _mistake(
            "the norm is over the words, and has to be over the features of each word",
            "단어 방향으로 정규화했습니다. 단어마다 특징 방향으로 정규화해야 합니다",
            ("mean(dim=-1", "mean(dim=-2"),
        ),
        _mistake("the ReLU was left out", "ReLU를 빠뜨렸습니다", (".relu()", "")),
        _UNSCALED,
        _WRONG_AXIS,
    ),
}
"""By exercise, what its wrong answers are compared with."""
