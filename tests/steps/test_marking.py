import pytest
import torch

from regard.steps import EXAMPLES, Mark
from regard.steps.exercise import Exercise, make_exercise
from regard.steps.marking import close, mark_exercise
from regard.steps.step_formulas import FORMULAS, formula_name
from regard.steps.step_mistakes import MISTAKES
from regard.steps.written_tables import WrittenTables

EXERCISES = {topic: make_exercise(topic, "1") for topic in EXAMPLES}
CASES = [
    (topic, table.key, mistake.said.en)
    for topic, exercise in EXERCISES.items()
    for table in exercise.asked
    for mistake in MISTAKES.get(formula_name(table), [])
]


def rounded(exercise: Exercise) -> dict[str, torch.Tensor]:
    """The sheet of a student who writes three digits."""
    return {table.key: (table.numbers * 1000).round() / 1000 for table in exercise.asked}


def carried_on(exercise: Exercise, key: str, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """The sheet of a student who has these numbers in one table, and computes correctly with them from there on."""
    written = rounded(exercise)
    tables = WrittenTables.of(exercise.steps)
    later = False
    for table in exercise.asked:
        tables = tables.seen_from(table)
        if later:
            written[table.key] = FORMULAS[formula_name(table)](tables)
        if table.key == key:
            written[key], later = numbers, True
        tables = tables.written(written[table.key])
    return written


def wrong_numbers(exercise: Exercise, key: str, said: str) -> torch.Tensor | None:
    """What a mistake makes of a table; None where it cannot be made there, or changes nothing."""
    table = exercise.steps[key]
    formula = next(mistake.formula for mistake in MISTAKES[formula_name(table)] if mistake.said.en == said)
    try:
        numbers = formula(WrittenTables.of(exercise.steps).seen_from(table))
    except (KeyError, IndexError, RuntimeError):
        return None
    if numbers.shape != table.numbers.shape or bool(numbers.isnan().any()) or bool(close(numbers, table.numbers).all()):
        return None
    return numbers


@pytest.mark.parametrize("topic", EXAMPLES)
def test_three_digits_are_right_and_blanks_are_blank(topic):
    exercise = make_exercise(topic, "5")
    cells = sum(table.numbers.numel() for table in exercise.asked)
    assert mark_exercise(exercise, rounded(exercise)).count(Mark.RIGHT) == cells
    blank = {table.key: torch.full_like(table.numbers, torch.nan) for table in exercise.asked}
    marked = mark_exercise(exercise, blank)
    assert marked.count(Mark.BLANK) == cells
    assert marked.first_wrong is None


def test_every_mistake_is_recognised_where_it_was_made():
    """Each wrong formula, made by a student who goes on correctly: the step is found, and the mistake is named."""
    made = set()
    for topic, key, said in CASES:
        exercise = EXERCISES[topic]
        numbers = wrong_numbers(exercise, key, said)
        if numbers is None:
            continue
        marked = mark_exercise(exercise, carried_on(exercise, key, numbers))
        assert marked.first_wrong is not None
        assert marked.first_wrong.table.key == key, (topic, key, said)
        assert said in [mistake.en for mistake in marked.mistakes], (topic, key, said)
        assert sum(table.count(Mark.WRONG) > 0 for table in marked.tables) == 1, (topic, key, said)
        made.add((formula_name(exercise.steps[key]), said))
    assert made == {(name, mistake.said.en) for name, mistakes in MISTAKES.items() for mistake in mistakes}


@pytest.mark.parametrize(
    ("topic", "key", "said"),
    [
        ("self-attention", "scaled_scores", "the scores were not scaled by 1/√d"),
        (
            "multi-head",
            "head1.scaled_scores",
            "the scores were divided by √d of the model, and not by that of a head",
        ),
    ],
)
def test_a_mistake_in_a_step_that_was_skipped_is_seen_from_the_next_one(topic, key, said):
    exercise = make_exercise(topic, "3")
    numbers = wrong_numbers(exercise, key, said)
    assert numbers is not None
    written = carried_on(exercise, key, numbers)
    written[key] = torch.full_like(numbers, torch.nan)
    marked = mark_exercise(exercise, written)
    assert marked.first_wrong is not None
    assert marked.first_wrong.table.key == key.replace("scaled_scores", "exponentials")
    assert said in [mistake.en for mistake in marked.mistakes]


def test_one_slip_is_wrong_and_what_follows_from_it_is_not():
    exercise = make_exercise("scaled-dot-product", "2")
    slip = exercise.steps["scores"].numbers.clone()
    slip[1, 2] += 1
    marked = mark_exercise(exercise, carried_on(exercise, "scores", slip))
    assert [table.count(Mark.WRONG) for table in marked.tables] == [1, 0, 0, 0, 0]
    assert [table.count(Mark.FOLLOWS) for table in marked.tables] == [0, 1, 1, 3, 2]
    assert marked.first_wrong is not None
    assert marked.first_wrong.first(Mark.WRONG) == (1, 2)
    assert marked.mistakes == ()  # arithmetic: no formula gives it


def test_the_mask_after_the_softmax_is_told_from_no_mask():
    exercise = make_exercise("causal-mask", "4")
    scores = exercise.steps["scores"].numbers
    full = scores.exp() / scores.exp().sum(-1, keepdim=True)
    hidden = exercise.steps["mask"].numbers == 0
    after = mark_exercise(exercise, carried_on(exercise, "weights", full.masked_fill(hidden, 0.0)))
    assert [mistake.en for mistake in after.mistakes] == [
        "the mask was applied after the softmax, and the rows no longer sum to 1"
    ]
    never = mark_exercise(exercise, carried_on(exercise, "masked_scores", scores))
    assert [mistake.en for mistake in never.mistakes] == ["the mask was not applied"]
