import pytest
import torch

from regard.errors import ConfigurationError
from regard.steps import EXAMPLES, worked_example
from regard.steps.exercise import LARGEST_SCORE, SCORES, make_exercise, step_of
from regard.steps.step_formulas import FORMULAS, formula_name
from regard.steps.written_tables import WrittenTables


@pytest.mark.parametrize("topic", EXAMPLES)
def test_every_mechanism_has_fresh_small_numbers_for_each_seed(topic):
    example, exercises = worked_example(topic), [make_exercise(topic, str(seed)) for seed in range(4)]
    assert len({str([table.numbers.tolist() for table in exercise.given]) for exercise in exercises}) == 4
    for exercise in exercises:
        assert exercise.steps.keys == example.keys
        assert exercise.steps.title == example.title
        assert exercise.asked
        for table in exercise.steps.tables:
            if step_of(table.key)[1] in SCORES:
                assert table.numbers[table.numbers.isfinite()].abs().max() <= LARGEST_SCORE
        inputs = [table for table in exercise.given if table.key in ("query", "key", "value", "input", "memory")]
        for table in inputs:
            assert torch.equal(table.numbers, table.numbers.round())
            assert table.numbers.abs().max() <= example[table.key].numbers.abs().max()
    again = make_exercise(topic, "3")
    for before, after in zip(exercises[3].steps.tables, again.steps.tables, strict=True):
        assert torch.equal(before.numbers, after.numbers)


@pytest.mark.parametrize("topic", EXAMPLES)
def test_the_formula_of_each_asked_table_gives_the_numbers_of_the_kernels(topic):
    """Float32 of the kernels, whose numbers are at most 403, against the formulas in float64."""
    for seed in "ab":
        exercise = make_exercise(topic, seed)
        tables = WrittenTables.of(exercise.steps)
        for table in exercise.asked:
            numbers = FORMULAS[formula_name(table)](tables.seen_from(table))
            torch.testing.assert_close(numbers, table.numbers, rtol=2**-18, atol=2**-20)


def test_what_is_drawn_is_for_exercises_alone():
    before = worked_example("luong-dot").text()
    make_exercise("luong-dot", "7")
    assert worked_example("luong-dot").text() == before


def test_an_unknown_topic_is_refused_with_the_nearest_names():
    with pytest.raises(ConfigurationError, match=r"no worked example 'multihead'; did you mean 'multi-head'\?"):
        make_exercise("multihead", "1")
