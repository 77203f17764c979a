import csv
import io

import pytest

from regard.errors import ConfigurationError
from regard.steps import Mark, mark_sheet
from regard.steps.answer_sheet import sheets_in
from regard.steps.mark_report import marks_csv, marks_text
from regard.steps.worksheet import csv_text, make_class_sheets, make_worksheet

TOPICS = ["causal-mask", "luong-dot"]


@pytest.fixture
def sheet():
    return make_worksheet(7, TOPICS, student=3)


def rows_of(sheet, *, blank: bool = False) -> list[list[str]]:
    """The rows of a sheet, filled in with three digits unless blank."""
    return [row.cells for row in sheet.rows("en", blank=blank)]


def save(tmp_path, rows):
    path = tmp_path / "sheet.csv"
    path.write_text(csv_text(rows), encoding="utf-8")
    return path


def row_at(rows, title, row=1):
    """The index of a row of the first table of this title."""
    return next(at for at, cells in enumerate(rows) if cells[0] == title) + 1 + row


def test_a_sheet_is_marked_as_it_was_filled_in(tmp_path, sheet):
    marked = mark_sheet(save(tmp_path, rows_of(sheet)))
    assert (
        marked.count(Mark.RIGHT)
        == marked.cells
        == sum(table.numbers.numel() for exercise in sheet.exercises for table in exercise.asked)
    )
    assert (marked.sheet.seed, marked.sheet.student) == (7, 3)
    assert mark_sheet(save(tmp_path, rows_of(sheet, blank=True))).count(Mark.BLANK) == marked.cells


@pytest.mark.parametrize("language", ["en", "ko"])
def test_a_file_of_the_library_is_read_back(tmp_path, language):
    make_worksheet(2, TOPICS).save(tmp_path / "sheet.csv", language)
    marked = mark_sheet(tmp_path / "sheet.csv")  # its answers, behind, are not read
    assert marked.count(Mark.BLANK) == marked.cells
    assert marked.language == language
    *sheets, answers = make_class_sheets(2, 3, TOPICS).save(tmp_path / "class.csv", language)
    assert [mark_sheet(path).sheet.student for path in sheets] == [1, 2, 3]
    assert [*sheets_in([tmp_path])] == [*sheets, tmp_path / "sheet.csv"]
    assert answers not in sheets_in([tmp_path])


@pytest.mark.parametrize("written", ["0.5", "1/2", "0,5", " 0.50 ", "5e-1"])
def test_a_number_is_read_as_it_is_usually_written(tmp_path, sheet, written):
    rows = rows_of(sheet)
    rows[row_at(rows, "Attention scores")][1] = written
    marked = mark_sheet(save(tmp_path, rows))
    assert float(marked.exercises[0].tables[0].written[0, 0]) == 0.5


@pytest.mark.parametrize("written", ["-∞", "\N{MINUS SIGN}∞", "-inf", "-Infinity"])
def test_minus_infinity_and_a_file_of_a_spreadsheet(tmp_path, sheet, written):
    rows = [[*row, "", ""] for row in rows_of(sheet)]
    rows[row_at(rows, "Scores with the mask")][2] = written
    text = csv_text(rows).replace(",", ";") + "\n;;\n"
    (tmp_path / "sheet.csv").write_text("\ufeff" + text, encoding="utf-8")
    path = tmp_path / "sheet.csv"
    if any("," in cell for row in rows_of(sheet) for cell in row):
        path = save(tmp_path, rows)  # a cell with a comma is not told from two by hand
    assert mark_sheet(path).count(Mark.WRONG) == 0


def remove_row(rows):
    del rows[row_at(rows, "Attention scores", 2)]


def remove_cell(rows):
    rows[row_at(rows, "Attention scores")].pop()


def add_cell(rows):
    rows[row_at(rows, "Attention scores")].append("4")


def add_row(rows):
    rows.append(["q9", "1"])


def write_text(rows):
    rows[row_at(rows, "Attention scores")][2] = "two"


def write_nan(rows):
    rows[row_at(rows, "Attention scores")][2] = "1/0"


def change_given(rows):
    rows[row_at(rows, "Queries Q")][1] = "17"


def another_seed(rows):
    rows[0][1] = "seed=8"


def unknown_topic(rows):
    rows[0][3] = "topics=causal"


def no_sheet(rows):
    rows[0] = ["Name", "Points"]


def wrong_seed(rows):
    rows[0][1] = "seed=seven"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_row, r"stands where the sheet has the row 'q2' of 'Attention scores': rows were removed"),
        (
            remove_cell,
            r"row 'q1' of 'Attention scores' has 2 cells, and needs 3, one for each of k1, k2, k3: .* missing",
        ),
        (add_cell, r"row 'q1' of 'Attention scores' has 4 cells, and needs 3, .*: cells are too many"),
        (add_row, r"\['q9', '1'\] stands behind the last table: remove it"),
        (write_text, r"line \d+: row 'q1', column 'k2' of 'Attention scores' has 'two'; it needs a number"),
        (write_nan, r"has '1/0'; it needs a number, such as 0.5, 1/2 or -∞, or nothing"),
        (
            change_given,
            r"'Queries Q' is 17, .*, and in the sheet of seed 7, student 3 it is .*: this is the sheet of another",
        ),
        (another_seed, r"in the sheet of seed 8, student 3 it is .*: this is the sheet of another seed"),
        (unknown_topic, r"there is no worked example 'causal'; did you mean 'causal-mask'\?"),
        (no_sheet, r"begins with 'Name,Points'; it needs the first row of a sheet that `regard steps --sheet"),
        (wrong_seed, r"seed=seven is no whole number"),
    ],
)
def test_a_file_that_is_not_the_sheet_is_refused(tmp_path, sheet, change, message):
    rows = rows_of(sheet)
    change(rows)
    with pytest.raises(ConfigurationError, match=message):
        mark_sheet(save(tmp_path, rows))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.csv cannot be read: No such file"):
        mark_sheet(tmp_path / "none.csv")
    (tmp_path / "old.csv").write_bytes("어텐션".encode("cp949"))
    with pytest.raises(ConfigurationError, match=r"old.csv is not UTF-8: save it from the spreadsheet as 'CSV UTF-8'"):
        mark_sheet(tmp_path / "old.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty has no .csv file; it needs sheets that were filled in"):
        next(sheets_in([tmp_path / "empty"]))


def test_a_report_says_the_first_wrong_step_in_both_languages(tmp_path):
    sheet = make_worksheet(7, ["scaled-dot-product"])
    exercise = sheet.exercises[0]
    rows = rows_of(sheet)
    start = row_at(rows, "Scores times the scale 0.500")
    for at, numbers in enumerate(exercise.steps["scores"].numbers.tolist()):
        rows[start + at][1:] = map(str, numbers)
    marked = mark_sheet(save(tmp_path, rows))
    english, korean = marks_text([marked], "en"), marks_text([marked], "ko")
    assert "Likely: the scores were not scaled by 1/√d." in english
    assert 'First wrong step: "Scores times the scale 0.500"; q' in english
    assert "짐작되는 실수: 점수를 √d로 나누지 않았습니다." in korean
    cells = [*csv.DictReader(io.StringIO(marks_csv([marked])))]
    assert len(cells) == marked.cells
    assert sum(cell["mark"] == "wrong" for cell in cells) == marked.count(Mark.WRONG) > 0
