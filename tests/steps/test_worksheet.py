import csv
import io

import pytest
import torch

from regard.errors import ConfigurationError
from regard.steps import make_worksheet


@pytest.mark.parametrize("seed", range(8))
def test_numbers_are_small_and_whole_and_differ_by_seed(seed):
    sheet = make_worksheet(seed)
    for exercise in sheet.exercises:
        for key in ("query", "key", "value", "scores"):
            numbers = exercise[key].numbers
            assert torch.equal(numbers, numbers.round())
        last = exercise["scaled_scores" if "scaled_scores" in exercise.keys else "scores"].numbers
        assert torch.equal(last, last.round())
        assert 0 <= last.min() <= last.max() <= 4
    assert make_worksheet(seed).html() == sheet.html()
    assert make_worksheet(seed + 1).html() != sheet.html()


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_answers_are_on_the_second_page_alone(language):
    page = make_worksheet(2).html(language)
    sheet, answers = page.split('<div class="answers">')
    assert "break-before: page" in sheet
    assert "<td class=blank></td>" in sheet
    assert "<td class=blank>" not in answers
    weights = make_worksheet(2).exercises[0]["weights"].numbers[0, 0]
    assert f"{weights:.3f}" not in sheet
    assert f"{weights:.3f}" in answers
    assert ("정답" in answers) == (language == "ko")


def test_csv_has_blanks_first_and_answers_behind(tmp_path):
    make_worksheet(1).save(tmp_path / "sheet.csv", "ko")
    text = (tmp_path / "sheet.csv").read_bytes()
    assert text.startswith(b"\xef\xbb\xbf")  # Excel's sign of UTF-8
    rows = list(csv.reader(io.StringIO(text.decode("utf-8-sig"))))
    at = [number for number, row in enumerate(rows) if row and row[0] == "어텐션 점수(스코어)"]
    assert rows[at[0] + 2] == ["q1", "", "", ""]
    assert rows[at[3] + 2][1:] == [str(int(x)) for x in make_worksheet(1).exercises[0]["scores"].numbers[0]]


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="written as .html or .csv; sheet.pdf ends in '.pdf'"):
        make_worksheet(1).save(tmp_path / "sheet.pdf")
