"""Wrong formulas that are often taken for that of a step, each run on the numbers of a sheet to be recognised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .step_formulas import (
    FORMULAS,
    Formula,
    columns,
    projected,
    score_projection,
    shares,
    state_update,
    tanh_tables,
    turned,
    with_sink,
)
from .wording import Wording
from .written_tables import WrittenTables


class Mistake(NamedTuple):
    """A wrong formula of a step, and a sentence that says what was done."""

    said: Wording
    formula: Formula


def _mistake(en: str, ko: str, formula: Formula) -> Mistake:
    return Mistake(Wording(en, ko), formula)


def _other_scale(factor: float | None = None, power: float = 0.5) -> Formula:
    """Scores over a power of the head's dim, or of `factor` times it."""
    return lambda tables: tables["scores"] / ((factor or 1) * tables["query"].shape[-1]) ** power


def _model_scale(tables: WrittenTables) -> Tensor:
    """Scores over the root of the dim of the whole layer: of its input, else of all heads."""
    model = tables["input"].shape[-1] if "input" in tables else tables.heads * tables["query"].shape[-1]
    return tables["scores"] / math.sqrt(model)


def _masked(tables: WrittenTables, keep: Tensor, hidden: float) -> Tensor:
    return tables.last_scores(masked=False).masked_fill(keep == 0, hidden)


def _reversed_bias(tables: WrittenTables) -> Tensor:
    scores = FORMULAS["masked_scores"](tables)
    return scores - 2 * tables["bias"]


def _wrong_axis(tables: WrittenTables) -> Tensor:
    """The exponentials over the sum of their column."""
    count = tables.at.numbers.shape[-1]
    return shares(tables["exponentials"][:, :count].T).T


def _mask_after_softmax(tables: WrittenTables) -> Tensor:
    """The softmax of all scores, then 0 where the mask is; the rows no longer sum to 1."""
    scores = tables.last_scores(masked=False)
    scores = scores + tables["bias"] if "bias" in tables else scores
    return scores.softmax(-1).masked_fill(tables["masked_scores"].isinf(), 0.0)


def _unscaled(tables: WrittenTables) -> Tensor:
    """The softmax of scores that are not divided by √d, where there is that step."""
    hidden = tables.last_scores().isinf()
    return (tables["scaled_scores"] * math.sqrt(tables["query"].shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)


def _exponentials_before_mask(tables: WrittenTables) -> Tensor:
    return with_sink(tables, tables.last_scores(masked=False).expand_as(tables["masked_scores"]))


def _exponentials_before_scaling(tables: WrittenTables) -> Tensor:
    return with_sink(tables, tables["scores"].expand_as(tables["scaled_scores"]))


def _other_head(step: str) -> Formula:
    return projected(step, head=lambda tables: (tables.head + 1) % tables.heads)


def _every_other_column(step: str) -> Formula:
    """The columns of a head taken one of every H, where heads are blocks of columns."""

    def formula(tables: WrittenTables) -> Tensor:
        rows = tables["memory"] if step != "query" and "memory" in tables else tables["input"]
        projected_rows = rows @ tables[f"{step}_projection"]
        own = columns(step, tables, tables.head)
        blocks = projected_rows.shape[-1] // (own.stop - own.start)
        return projected_rows[:, own.start // (own.stop - own.start) :: blocks]

    return formula


def _transposed_projection(step: str) -> Formula:
    def formula(tables: WrittenTables) -> Tensor:
        rows = tables["memory"] if step != "query" and "memory" in tables else tables["input"]
        return (rows @ tables[f"{step}_projection"].T)[:, columns(step, tables, tables.head)]

    return formula


def _of_inputs(step: str) -> list[Mistake]:
    return [
        _mistake("the columns of W are those of another head", "다른 헤드의 W 열을 썼습니다", _other_head(step)),
        _mistake(
            "heads are blocks of neighbouring columns of W; here every other column was taken",
            "헤드는 W의 이웃한 열 묶음인데, 열을 하나씩 건너뛰며 가져왔습니다",
            _every_other_column(step),
        ),
        _mistake("W is transposed", "W를 전치해서 곱했습니다", _transposed_projection(step)),
    ]


def _of_rotation(step: str) -> list[Mistake]:
    return [
        _mistake("turned in the other direction", "반대 방향으로 회전했습니다", turned(step, -1)),
        _mistake("positions were counted from 1, not from 0", "위치를 0이 아니라 1부터 셌습니다", turned(step, 1, 1)),
        _mistake("not turned", "회전하지 않았습니다", lambda tables: tables[f"unrotated_{step}"]),
    ]


_TRANSPOSED_MATRIX = _mistake(
    "the matrix is transposed",
    "행렬을 전치해서 곱했습니다",
    lambda tables: tables["query"] @ tables["score.weight"].T,
)
_MASKING = [
    _mistake(
        "the mask was not applied", "마스크를 적용하지 않았습니다", lambda tables: tables.last_scores(masked=False)
    ),
    _mistake(
        "the mask was read the wrong way round: 1 means attend",
        "마스크를 거꾸로 읽었습니다. 1이 '참조'입니다",
        lambda tables: _masked(tables, 1 - tables["mask"], -math.inf),
    ),
    _mistake(
        "the mask is transposed", "마스크를 전치했습니다", lambda tables: _masked(tables, tables["mask"].T, -math.inf)
    ),
    _mistake(
        "a masked score is 0, and not -∞",
        "가려진 점수를 -∞가 아니라 0으로 두었습니다",
        lambda tables: _masked(tables, tables["mask"], 0.0),
    ),
]
_BIAS = [
    _mistake("the bias was subtracted, not added", "편향을 더하지 않고 뺐습니다", _reversed_bias),
    _mistake(
        "the bias was left out",
        "편향을 더하지 않았습니다",
        lambda tables: FORMULAS["masked_scores"](tables) - tables["bias"],
    ),
]
_SOFTMAX = [
    _mistake(
        "softmax over the wrong axis: the columns sum to 1, and not the rows",
        "소프트맥스의 축이 틀렸습니다. 행이 아니라 열의 합이 1입니다",
        _wrong_axis,
    ),
    _mistake(
        "the mask was applied after the softmax, and the rows no longer sum to 1",
        "소프트맥스를 계산한 뒤에 마스크를 적용해 행의 합이 1이 아닙니다",
        _mask_after_softmax,
    ),
    _mistake(
        "softmax without its exponentials: scores over their sum",
        "지수 함수를 쓰지 않고 점수를 그 합으로 나누었습니다",
        lambda tables: shares(tables.last_scores()),
    ),
    _mistake(
        "the exponentials were not divided by their sum",
        "지수 함수값을 합으로 나누지 않았습니다",
        lambda tables: tables["exponentials"][:, : tables.at.numbers.shape[-1]],
    ),
    _mistake("the scores were not scaled by 1/√d", "점수를 √d로 나누지 않았습니다", _unscaled),
    _mistake(
        "the sum leaves out the last exponential of the row, that of the sink",
        "합에서 행의 마지막 지수 함수값(싱크)을 빠뜨렸습니다",
        lambda tables: shares(tables["exponentials"][:, : tables.at.numbers.shape[-1]]),
    ),
    _mistake("the weights are transposed", "가중치를 전치했습니다", lambda tables: FORMULAS["weights"](tables).T),
]

MISTAKES: Mapping[str, list[Mistake]] = {
    "query": _of_inputs("query"),
    "key": _of_inputs("key"),
    "value": _of_inputs("value"),
    "rotated_query": _of_rotation("query"),
    "rotated_key": _of_rotation("key"),
    "projected_key": [
        _mistake(
            "U is transposed", "U를 전치해서 곱했습니다", lambda tables: tables["key"] @ tables["score.key_weight"]
        )
    ],
    "general_query": [_TRANSPOSED_MATRIX],
    "sum": [
        _mistake(
            "W q was left out of the sums",
            "합에 W q를 더하지 않았습니다",
            lambda tables: score_projection(tables, "key"),
        ),
        _mistake(
            "W q was subtracted from the keys",
            "키에서 W q를 뺐습니다",
            lambda tables: tables["projected_key"] - tables["projected_query"][tables.index - 1],
        ),
    ],
    "tanh": [
        _mistake(
            "the sums were left as they are, without tanh",
            "tanh를 적용하지 않았습니다",
            lambda tables: tables[f"sum.{tables.index}"],
        ),
        _mistake(
            "sigmoid in place of tanh",
            "tanh 대신 시그모이드를 썼습니다",
            lambda tables: tables[f"sum.{tables.index}"].sigmoid(),
        ),
    ],
    "additive_scores": [
        _mistake(
            "tanh was summed without v", "v를 곱하지 않고 tanh를 더했습니다", lambda tables: tanh_tables(tables).sum(-1)
        ),
    ],
    "scores": [
        _mistake(
            "the scores are transposed: rows are queries",
            "점수를 전치했습니다. 행이 질의입니다",
            lambda tables: FORMULAS["scores"](tables).T,
        ),
        _mistake(
            "the dot products are those of queries and values",
            "질의와 키가 아니라 질의와 값을 내적했습니다",
            lambda tables: tables["query"] @ tables["value"].T,
        ),
        _mistake(
            "the dot products are those of keys and keys",
            "질의와 키가 아니라 키끼리 내적했습니다",
            lambda tables: tables["key"] @ tables["key"].T,
        ),
    ],
    "scaled_scores": [
        _mistake(
            "the scores were not scaled by 1/√d", "점수를 √d로 나누지 않았습니다", lambda tables: tables["scores"]
        ),
        _mistake(
            "the scores were divided by d, and not by √d", "√d가 아니라 d로 나누었습니다", _other_scale(power=1.0)
        ),
        _mistake("the scores were multiplied by √d", "√d로 나누지 않고 곱했습니다", _other_scale(power=-0.5)),
        _mistake(
            "the scores were divided by √d of the model, and not by that of a head",
            "헤드의 √d가 아니라 모델의 √d로 나누었습니다",
            _model_scale,
        ),
        _mistake(
            "the scores are transposed", "점수를 전치했습니다", lambda tables: FORMULAS["scaled_scores"](tables).T
        ),
    ],
    "masked_scores": _MASKING,
    "biased_scores": _BIAS,
    "biased_and_masked_scores": [*_MASKING, *_BIAS],
    "exponentials": [
        _mistake(
            "the exponentials are those of the scores without mask and bias",
            "마스크와 편향을 적용하지 않은 점수에 지수 함수를 적용했습니다",
            _exponentials_before_mask,
        ),
        _mistake(
            "the exponentials are those of scores without 1/√d",
            "√d로 나누지 않은 점수에 지수 함수를 적용했습니다",
            _exponentials_before_scaling,
        ),
        _mistake(
            "the exponential of -∞ is 0, and not 1",
            "-∞의 지수 함수값은 1이 아니라 0입니다",
            lambda tables: with_sink(tables, tables.last_scores().masked_fill(tables.last_scores().isinf(), 0.0)),
        ),
        _mistake(
            "powers of 2 in place of e",
            "e 대신 2의 거듭제곱을 썼습니다",
            lambda tables: with_sink(tables, tables.last_scores() * math.log(2)),
        ),
    ],
    "weights": _SOFTMAX,
    "exact.weights": [
        _mistake(
            "softmax over the wrong axis: the columns sum to 1, and not the rows",
            "소프트맥스의 축이 틀렸습니다. 행이 아니라 열의 합이 1입니다",
            lambda tables: shares(FORMULAS["exact.exponentials"](tables).T).T,
        ),
    ],
    "delta_state": [
        _mistake(
            "the value was added, and that of its key stayed",
            "키에 있던 값을 빼지 않고 새 값을 더했습니다",
            state_update(),
        ),
    ],
    "decayed_state": [
        _mistake("the state was not multiplied by e^g", "상태에 e^g를 곱하지 않았습니다", state_update())
    ],
    "memory_error": [
        _mistake(
            "the error has the wrong sign: what the memory has is less the value",
            "오차의 부호가 반대입니다. 기억이 내놓는 값에서 실제 값을 뺍니다",
            lambda tables: -FORMULAS["memory_error"](tables),
        ),
    ],
    "memory_step": [
        _mistake(
            "the step before was left out, which is the momentum",
            "모멘텀, 곧 이전 갱신량을 더하지 않았습니다",
            lambda tables: -tables["key"][tables.index - 1].outer(tables[f"error.{tables.index}"][0]),
        ),
        _mistake(
            "the gradient was added, not subtracted",
            "경사를 빼지 않고 더했습니다",
            lambda tables: (
                FORMULAS["memory_step"](tables)
                + 2 * tables["key"][tables.index - 1].outer(tables[f"error.{tables.index}"][0])
            ),
        ),
    ],
    "memory_state": [
        _mistake(
            "the memory was not multiplied by e^g",
            "기억에 e^g를 곱하지 않았습니다",
            lambda tables: 2 * FORMULAS["memory_state"](tables) - tables[f"step.{tables.index}"],
        ),
    ],
    "model_gradient": [
        _mistake(
            "the error itself, and not its gradient through the norm",
            "정규화를 거친 경사가 아니라 오차를 그대로 썼습니다",
            lambda tables: tables[f"error.{tables.index}"],
        ),
    ],
    "outputs": [
        _mistake(
            "the real part was not doubled, for the conjugate",
            "켤레 복소수의 몫인 2를 곱하지 않았습니다",
            lambda tables: (FORMULAS["outputs"](tables) + tables["channel_parameters"][3, 0] * tables["input"]) / 2,
        ),
    ],
    "landmark_context": [
        _mistake(
            "the inverse of A was left out",
            "A의 역행렬을 곱하지 않았습니다",
            lambda tables: tables["landmark_kernel"] @ tables["gathered_values"],
        ),
    ],
    "sample_factors": [
        _mistake(
            "the mean of the nearness was not subtracted",
            "가까운 정도의 평균을 빼지 않았습니다",
            lambda tables: tables["sample_densities"] + tables["nearness"],
        ),
    ],
    "linear_weights": [
        _mistake(
            "softmax of the products, which linear attention does without",
            "선형 어텐션에 없는 소프트맥스를 적용했습니다",
            lambda tables: tables.last_scores().softmax(-1),
        ),
    ],
    "context": [
        _mistake(
            "the weights are transposed",
            "가중치를 전치해서 곱했습니다",
            lambda tables: tables.attended("weights").T @ tables.attended("value"),
        ),
        _mistake(
            "the weighted sum is that of the keys, and not of the values",
            "값이 아니라 키를 가중합했습니다",
            lambda tables: tables.attended("weights") @ tables.attended("key"),
        ),
        _mistake(
            "the values were averaged without their weights",
            "가중치 없이 값의 평균을 냈습니다",
            lambda tables: tables.attended("value").mean(0).expand_as(tables.at.numbers),
        ),
        _mistake(
            "the values were summed without their weights",
            "가중치를 곱하지 않고 값을 더했습니다",
            lambda tables: tables.attended("value").sum(0).expand_as(tables.at.numbers),
        ),
    ],
    "concatenation": [
        _mistake(
            "the heads were joined in the reverse order",
            "헤드를 거꾸로 이어 붙였습니다",
            lambda tables: torch.cat(FORMULAS["concatenation"](tables).chunk(tables.heads, -1)[::-1], -1),
        ),
    ],
    "concatenated": [
        _mistake(
            "the order is [s; c], and should be [c; s]",
            "[c; s]가 아니라 [s; c]의 순서로 이어 붙였습니다",
            lambda tables: torch.cat([tables["query"], tables["context"]], -1),
        ),
    ],
    "attentional": [
        _mistake(
            "tanh was left out",
            "tanh를 적용하지 않았습니다",
            lambda tables: tables["concatenated"] @ tables["attentional_projection"].T,
        ),
    ],
    "prediction": [
        _mistake(
            "the scores of the words, without softmax",
            "소프트맥스를 적용하지 않은 단어의 점수입니다",
            lambda tables: tables["attentional"] @ tables["prediction_projection"].T,
        ),
    ],
    "next_state": [
        _mistake(
            "the candidate alone: the old state was left out",
            "이전 상태를 더하지 않은 후보 상태입니다",
            lambda tables: (tables["cell_input"] @ tables["cell_projection"].T).tanh(),
        ),
        _mistake(
            "tanh was left out",
            "tanh를 적용하지 않았습니다",
            lambda tables: (tables["cell_input"] @ tables["cell_projection"].T + tables["query"]) / 2,
        ),
    ],
}
"""By the name of the formula, as `FORMULAS` has it."""
