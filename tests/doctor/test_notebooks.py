"""Notebooks: their cells are one module, and a finding names its cell."""

import json

import pytest
from typer.testing import CliRunner

from regard.doctor import diagnosis_page
from regard_command.app import app
from regard_doctor import Severity, diagnose_file
from regard_doctor.notebook_source import notebook_source

IMPORTS = "import torch\nimport torch.nn.functional as F\n%matplotlib inline\n!pip install torch"
WRONG = "def attend(q, k, v):\n    weights = F.softmax(q @ k.mT / q.size(-1) ** 0.5, dim=-2)\n    return weights @ v"


def notebook(*cells: str) -> str:
    """A notebook of format 4: code, and Markdown where a cell begins with '#'."""
    kinds = ({"cell_type": "markdown" if cell.startswith("# ") else "code", "source": cell} for cell in cells)
    return json.dumps({"nbformat": 4, "cells": [{**kind, "source": kind["source"].splitlines(True)} for kind in kinds]})


@pytest.fixture
def written(tmp_path):
    def write(text: str):
        path = tmp_path / "lesson.ipynb"
        path.write_text(text)
        return path

    return write


def test_a_finding_names_its_cell_and_the_line_in_it(written):
    path = written(notebook("# Attention", IMPORTS, WRONG))
    (found,) = [one for one in diagnose_file(path) if one.severity is Severity.ERROR]
    assert (found.code, found.cell, found.line, found.fixable) == ("ATT111", 3, 2, False)
    assert str(found).startswith(f"{path}:cell 3:2:15: ATT111 softmax over axis -2")


def test_what_one_cell_defines_the_next_uses(written):
    path = written(notebook(IMPORTS, "axis = -2", "def attend(q, k, v):\n    return F.softmax(q @ k.mT / 8, axis) @ v"))
    assert [(one.code, one.cell) for one in diagnose_file(path) if one.severity is Severity.ERROR] == [("ATT111", 3)]


def test_a_comment_in_a_cell_suppresses(written):
    wrong = WRONG.replace("dim=-2)", "dim=-2)  # regard: ignore[ATT111] over queries")
    assert not [one for one in diagnose_file(written(notebook(IMPORTS, wrong))) if one.code == "ATT111"]


def test_a_cell_that_does_not_parse_leaves_the_others(written):
    path = written(notebook(IMPORTS, "softmax = (", WRONG, "%%bash\nsoftmax ) ("))
    found = [one for one in diagnose_file(path) if one.severity is Severity.ERROR]
    assert [(one.code, one.cell) for one in found] == [("ATT000", 2), ("ATT111", 3)]
    assert found[0].message.startswith("the cell does not parse: line 1: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softmax {", "the file is no notebook: it is not JSON"),
        ('["softmax"]', "the file is no notebook of format 4, which has a list of cells"),
        ('{"worksheets": ["softmax"]}', "the file is no notebook of format 4, which has a list of cells"),
    ],
)
def test_a_file_that_is_no_notebook(written, text, message):
    (found,) = diagnose_file(written(text))
    assert (found.code, found.severity) == ("ATT000", Severity.ERROR)
    assert message in found.message


def test_cells_of_odd_content_are_read():
    cells = [{"cell_type": "code", "source": 3}, {"cell_type": "code"}, "text", {"cell_type": "code", "source": "x?"}]
    assert notebook_source(json.dumps({"nbformat": 4, "cells": cells})).module == "\n\n\n"


def test_the_command_reads_notebooks_in_folders_and_fixes_none(written, tmp_path):
    path = written(notebook(IMPORTS, WRONG))
    before = path.read_bytes()
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--fix", "--min-severity", "hint"])
    assert (done.exit_code, "cell 2:2:15: ATT111" in done.stdout) == (1, True)
    assert path.read_bytes() == before


def test_the_page_shows_the_lines_of_the_cell(written):
    found = [one for one in diagnose_file(written(notebook(IMPORTS, WRONG))) if one.code == "ATT111"]
    page = diagnosis_page(found).text
    assert "cell 2, line 2, column 15" in page
    assert "weights" in page


def test_a_command_on_several_lines_is_left_out(written):
    path = written(notebook(IMPORTS, "if True:\n  !git clone \\\n     HOST/x\n\n" + WRONG))
    assert [one.code for one in diagnose_file(path) if one.severity is Severity.ERROR] == ["ATT111"]


def test_what_a_cell_ends_with_is_shown_and_not_dropped(written):
    attend = WRONG.replace("dim=-2", "dim=-1")
    path = written(notebook(IMPORTS, attend, "scores = torch.randn(2, 3)\nscores.transpose(0, 1)"))
    assert not [one for one in diagnose_file(path) if one.code == "ATT251"]
