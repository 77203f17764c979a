"""An exercise: a worked example with fresh numbers, of which some tables are given and the others are asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigurationError
from .fresh_numbers import FreshNumbers
from .page_tables import GIVEN
from .step_table import StepTable, Walkthrough
from .wording import Wording
from .worked_examples import worked_example

LARGEST_SCORE = 6.0
"""The largest score, and the smallest with its sign reversed: exp(6) = 403 can still be written down."""
MOST_TRIES = 2000
SCORES = ("scores", "scaled_scores", "masked_scores")
UNASKED = ("weighted_values",)
"""Tables that a sheet leaves out: the context says the same in fewer cells."""
HINTS = {
    "bahdanau": Wording(
        "Both gates of the GRU are 1/2: s_2 = (tanh(W_n [y1; c2]) + s_1) / 2.",
        "GRU의 두 게이트는 모두 1/2입니다. s_2 = (tanh(W_n [y1; c2]) + s_1) / 2.",
    ),
    "local-p": Wording("The source has S = 4 words.", "원문의 길이는 S = 4입니다."),
    "rotary": Wording(
        "A vector at position m, from 0, is turned by m quarter turns, each of which makes (-b, a) of (a, b).",
        "위치 m(0부터)의 벡터는 90도씩 m번 회전합니다. 한 번 회전하면 (a, b)가 (-b, a)가 됩니다.",
    ),
    "transformer-block": Wording(
        "A norm takes the mean of a row from it and divides by its standard deviation; b_1 and b_2 are 0.",
        "정규화는 행에서 평균을 빼고 표준편차로 나눕니다. 신경망의 b_1과 b_2는 0입니다.",
    ),
    "attention-sink": Wording("The score of the sink is 1.", "싱크의 점수는 1입니다."),
    "top-scores": Wording(
        "Softmax over the two largest scores of a row; the other weights are 0.",
        "행마다 가장 큰 점수 둘에만 소프트맥스를 적용하고, 나머지 가중치는 0입니다.",
    ),
    "softmax1": Wording("a_ij = exp(e_ij) / (1 + Σ_k exp(e_ik))", "a_ij = exp(e_ij) / (1 + Σ_k exp(e_ik))"),
    "sigmoid": Wording("b = -1", "b = -1"),
    "linear": Wording("φ(x) = max(x, 0)", "φ(x) = max(x, 0)"),
    "linear-decay": Wording("φ(x) = x, and e^g = 1/2.", "φ(x) = x이고 e^g = 1/2입니다."),
    "delta-rule": Wording("φ(x) = x, and β_t = 1.", "φ(x) = x이고 β_t = 1입니다."),
    "performer": Wording(
        "m = 2; with one feature, q' = q and k' = k.", "m = 2이고, 특징이 하나이므로 q' = q, k' = k입니다."
    ),
    "grouped-query": Wording(
        "Heads 1 and 2 share one key head, heads 3 and 4 the other.",
        "헤드 1과 2가 키 헤드 하나를, 헤드 3과 4가 다른 하나를 함께 씁니다.",
    ),
    "multi-query": Wording("Both heads share one key head.", "두 헤드가 키 헤드 하나를 함께 씁니다."),
    "flash": Wording("A tile has two keys.", "타일 하나에 키가 둘입니다."),
    "ring": Wording(
        "The process has positions 3 and 4, and no position attends to a later one.",
        "이 프로세스는 위치 3과 4를 맡고, 어느 위치도 뒤의 위치를 보지 않습니다.",
    ),
}
"""What the tables of an example do not say."""


@dataclass(frozen=True, eq=False)
class Exercise:
    """A walkthrough with fresh numbers: what is `given`, and the tables that are `asked`, in their order."""

    topic: str
    steps: Walkthrough
    given: tuple[StepTable, ...]
    asked: tuple[StepTable, ...]

    @property
    def hint(self) -> Wording | None:
        """What the tables do not say, if there is anything."""
        return HINTS.get(self.topic)


def make_exercise(topic: str, seed: str) -> Exercise:
    """The exercise of a worked example for a seed, which is any text.

    Inputs are whole numbers as small as those of the example; scores are at most 6, and in each table they differ.

    Raises:
        ConfigurationError: there is no example of that name; the message has the nearest names.

    >>> from regard.steps.exercise import make_exercise
    >>> exercise = make_exercise("causal-mask", "7")
    >>> [table.key for table in exercise.asked]
    ['scores', 'masked_scores', 'exponentials', 'weights', 'context']
    """
    fresh = FreshNumbers(f"{topic}, {seed}")
    for _ in range(MOST_TRIES):
        with fresh.drawing():
            steps = worked_example(topic)
        if _suits(steps):
            break
        fresh.draw_again()
    else:
        raise ConfigurationError(f"no numbers of seed {seed} suit the exercise {topic!r}: take another seed")
    given = tuple(table for table in steps.tables if is_given(table, steps))
    asked = tuple(table for table in steps.tables if is_asked(table, steps))
    return Exercise(topic, steps, given, asked)


def step_of(key: str) -> tuple[str, str]:
    """The prefix of a table's key and the name of its step: "head2." and "weights" of "head2.weights".

    >>> step_of("head2.weights"), step_of("exact.context"), step_of("tanh.1"), step_of("score.query_weight")
    (('head2.', 'weights'), ('exact.', 'context'), ('', 'tanh'), ('score.', 'query_weight'))
    """
    parts = [part for part in key.split(".") if not part.isdecimal()]
    return "".join(f"{part}." for part in parts[:-1]), parts[-1]


def is_given(table: StepTable, steps: Walkthrough) -> bool:
    """Whether a table is what the others are computed from."""
    prefix, step = step_of(table.key)
    if step in _derived(steps):
        return False
    return step in GIVEN or step.endswith("_projection") or prefix == "score." or step == "coverage"


def is_asked(table: StepTable, steps: Walkthrough) -> bool:
    """Whether a table is left blank on a sheet."""
    _, step = step_of(table.key)
    plain = "positions" in steps.keys and "query_projection" not in steps.keys
    repeated = plain and step in ("query", "key", "value")  # all three are the input
    return not (is_given(table, steps) or step in UNASKED or repeated)


def _derived(steps: Walkthrough) -> set[str]:
    """Tables that are inputs in most walkthroughs, and computed in this one."""
    derived = {"projected_query", "projected_key"}
    if "query_projection" in steps.keys:
        derived |= {"query", "key", "value"}
    if "unrotated_query" in steps.keys:
        derived |= {"query", "key"}
    if "positions" in steps.keys:
        derived |= {"input", "query", "key", "value"}
    return derived


def _suits(steps: Walkthrough) -> bool:
    """Whether all scores are small, and in each table of them, in some row, they differ."""
    for table in steps.tables:
        if step_of(table.key)[1] not in SCORES:
            continue
        hidden = table.numbers.isinf()
        largest, smallest = table.numbers.amax(-1), table.numbers.masked_fill(hidden, torch.inf).amin(-1)
        small = float(table.numbers.masked_fill(hidden, 0.0).abs().amax()) <= LARGEST_SCORE
        if not (small and bool((largest > smallest).any())):
            return False
    return True
