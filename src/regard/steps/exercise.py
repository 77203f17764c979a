"""An exercise: a worked example with fresh numbers, of which some tables are given and the others are asked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import ConfigurationError
from .fresh_numbers import FreshNumbers
from .page_tables import GIVEN
from .step_table import StepTable, Walkthrough
from .worked_examples import worked_example

LARGEST_SCORE = 6.0
"""The largest score, and the smallest with its sign reversed: exp(6) = 403 can still be written down."""
MOST_TRIES = 2000
SCORES = ("scores", "scaled_scores", "masked_scores")
UNASKED = ("weighted_values",)
"""Tables that a sheet leaves out: the context says the same in fewer cells."""


@dataclass(frozen=True, eq=False)
class Exercise:
    """A walkthrough with fresh numbers: what is `given`, and the tables that are `asked`, in their order."""

    topic: str
    steps: Walkthrough
    given: tuple[StepTable, ...]
    asked: tuple[StepTable, ...]


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
