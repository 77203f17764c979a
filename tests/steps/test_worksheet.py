import csv
import io

import pytest

from regard.errors import ConfigurationError
from regard.steps import EXAMPLES, make_class_sheets, make_worksheet


def test_a_sheet_is_a_function_of_its_seed():
    assert make_worksheet(3).html() == make_worksheet(3).html()
    assert make_worksheet(4).html() != make_worksheet(3).html()
    assert [exercise.topic for exercise in make_worksheet().exercises] == [
        "luong-dot",
        "scaled-dot-product",
        "causal-mask",
    ]


@pytest.mark.parametrize("language", ["en", "ko"])
def test_the_answers_are_on_the_second_page_alone(language):
    page = make_worksheet(2).html(language)
    sheet, answers = page.split('<div class="answers">')
    assert "break-before: page" in sheet
    assert "<td class=blank></td>" in sheet
    assert "<td class=blank>" not in answers
    weights = make_worksheet(2).exercises[0].steps["weights"].numbers[0, 0]
    assert f"{weights:.3f}" not in sheet
    assert f"{weights:.3f}" in answers
    assert ("정답" in answers) == (language == "ko")


@pytest.mark.parametrize("topic", EXAMPLES)
def test_a_sheet_shows_what_is_given_and_no_number_that_is_asked(topic):
    sheet = make_worksheet(5, [topic])
    exercise = sheet.exercises[0]
    assert {table.key for table in exercise.given}.isdisjoint(table.key for table in exercise.asked)
    rows = [row for row in sheet.rows() if row.table is not None]
    asked = {table.key for table in exercise.asked}
    assert all(any(row.cells[1:]) != (row.table.key in asked) for row in rows if row.table is not None)
    assert {row.table.key for row in rows if row.table is not None} >= asked
    assert sheet.html("ko").count("<td class=blank></td>") == sum(table.numbers.numel() for table in exercise.asked)


def test_csv_has_blanks_first_and_answers_behind(tmp_path):
    make_worksheet(1).save(tmp_path / "sheet.csv", "ko")
    text = (tmp_path / "sheet.csv").read_bytes()
    assert text.startswith(b"\xef\xbb\xbf")  # Excel's sign of UTF-8
    rows = list(csv.reader(io.StringIO(text.decode("utf-8-sig"))))
    at = [number for number, row in enumerate(rows) if row and row[0] == "1. 어텐션 점수(스코어)"]
    assert rows[at[0] + 2] == ["s1", "", "", ""]
    scores = make_worksheet(1).exercises[0].steps["scores"].numbers[0]
    assert rows[at[1] + 2][1:] == [str(int(x)) for x in scores]
    assert rows[0][1:] == ["seed=1", "", "topics=luong-dot scaled-dot-product causal-mask", "lang=ko"]


def test_a_class_has_a_sheet_for_each_student_and_one_file_of_answers(tmp_path):
    sheets = make_class_sheets(9, 30, ["causal-mask", "multi-head"])
    assert len({sheet.questions("en") for sheet in sheets.sheets}) == 30
    paths = sheets.save(tmp_path / "class.html", "ko")
    assert [path.name for path in paths] == ["class.html", "class-answers.html"]
    page, answers = (path.read_text("utf-8") for path in paths)
    assert page.count('<div class="sheet">') == answers.count('<div class="sheet">') == 30
    assert "class=blank" in page
    assert "class=blank" not in answers
    assert 'class="answers"' not in page
    names = [path.name for path in sheets.save(tmp_path / "class.csv")]
    assert names == [*(f"class-{student:02}.csv" for student in range(1, 31)), "class-answers.csv"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_worksheet(1, []), "topics is empty; a sheet needs one at least"),
        (lambda: make_worksheet(1, ["flash", "flash"]), "the topic 'flash' is named twice"),
        (lambda: make_worksheet(1, ["flsh"]), r"no worked example 'flsh'; did you mean 'flash'\?"),
        (lambda: make_class_sheets(1, 0), "students is 0; a class has 1 to 1000"),
        (lambda: make_class_sheets(1, 1001), "students is 1001; a class has 1 to 1000"),
        (lambda: make_worksheet(1).save("sheet.pdf"), "written as .html or .csv; sheet.pdf ends in '.pdf'"),
    ],
)
def test_sheets_that_cannot_be_made(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
