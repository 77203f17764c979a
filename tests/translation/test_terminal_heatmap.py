import io
from typing import Literal

import pytest
import torch
from rich.cells import cell_len
from rich.color import Color
from rich.console import Console

from regard.errors import ShapeError
from regard.translation.terminal import alignment_table

KOREAN = list("2020년 3월 14일 토요일")
ISO = list("2020-03-14")


def diagonal(rows, columns):
    weights = torch.zeros(rows, columns)
    for row in range(rows):
        weights[row, row * columns // rows] = 1.0
    return weights


def lines(table, width=80, **console):
    file = io.StringIO()
    Console(file=file, width=width, **console).print(table)
    return file.getvalue().split("\n")


def coloured_cells(table, width=80, color_system: Literal["truecolor", "256"] = "truecolor"):
    """Of each line the background of every terminal cell."""
    console = Console(width=width, force_terminal=True, color_system=color_system, file=io.StringIO())
    return [
        [segment.style.bgcolor if segment.style else None for segment in line for _ in range(cell_len(segment.text))]
        for line in console.render_lines(table, pad=False)
    ]


def test_digits_where_there_are_no_colours():
    table = alignment_table([[0.8, 0.2, 0.0], [0.1, 0.39, 0.41]], ["das", "Haus"], ["a", "b", "c"])
    assert lines(table)[:6] == [
        "     a b c ",
        " das│9 2 . ",
        "Haus│1 4 5 ",
        "",
        "     tenths of 0.80; . is less than one",
        "",
    ]


@pytest.mark.parametrize(
    "console",
    [
        {"no_color": True, "force_terminal": True, "color_system": "truecolor"},
        {"color_system": None},
        {"force_terminal": True, "color_system": "standard"},  # sixteen colours cannot show a scale
    ],
)
def test_consoles_that_get_digits(console):
    assert "│9 ." in lines(alignment_table([[1.0, 0.0]], ["a"], ["b", "c"]), **console)[1]


def test_plain_ascii():
    table = alignment_table([[1.0, 0.0]], ["a"], ["b", "c"])
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=40)
    text = "".join(segment.text for line in console.render_lines(table, pad=False) for segment in line)
    assert text.startswith("  b c a|9 . ")
    assert text.isascii()


@pytest.mark.parametrize("color_system", ["truecolor", "256"])
def test_colours_rise_with_the_weight(color_system):
    cells = coloured_cells(alignment_table([[0.0, 0.6, 1.5]], ["a"], ["b", "c", "d"]), color_system=color_system)
    row = cells[1]
    assert len(row) == 2 + 3 * 2
    assert row[:2] == [None, None]
    assert row[2::2] == [Color.parse(colour) for colour in ("#440154", "#2a788e", "#fde725")]
    assert row[2::2] == row[3::2]


def test_the_scale_ends_at_the_greatest_weight():
    console = Console(width=60, force_terminal=True, color_system="truecolor", file=io.StringIO())
    text = "".join(
        segment.text for segment in console.render_lines(alignment_table([[0.7, 0.3]], ["a"], ["b", "c"]))[3]
    )
    assert text.split() == ["0", "0.70"]


def test_wide_characters_stand_above_their_cells():
    cells = coloured_cells(alignment_table(diagonal(10, 16), ISO, KOREAN))
    header = lines(alignment_table(diagonal(10, 16), ISO, KOREAN))[0]
    assert header == "  2 0 2 0 년␣ 3 월␣ 1 4 일␣ 토요일"
    assert cell_len(header) == 2 + 2 * 16
    assert all(len(line) == 2 + 2 * 16 for line in cells[1:11])


def test_wide_row_names_line_up():
    table = lines(alignment_table(torch.eye(3), ["가나", "abc", "d"], ["a", "b", "c"]))
    assert {cell_len(line) for line in table[:4]} == {4 + 1 + 6}
    assert table[1].startswith("가나│9")
    assert table[2].startswith(" abc│.")


def test_words_stand_side_by_side_where_they_fit():
    table = alignment_table(torch.eye(3), ["a", "b", "c"], ["Donnerstag", "der", "neunte"])
    assert lines(table, width=30)[:2] == ["  Donnerstag der neunte ", "a│9          .   .      "]


def test_words_stand_upright_where_they_do_not():
    table = alignment_table(torch.eye(3), ["a", "b", "c"], ["Donner", "der", "e\u0301te"])
    assert [line.rstrip() for line in lines(table, width=12)[:7]] == [
        "  D",
        "  o",
        "  n",
        "  n d e\u0301",
        "  e e t",
        "  r r e",
        "a│9 . .",
    ]


def test_upright_words_are_cut():
    table = lines(alignment_table(torch.eye(2), ["a", "b"], ["abcdefghijklmnop", "x"]), width=10)
    assert [line.strip() for line in table[10:12]] == ["k", "… x"]


def test_columns_that_do_not_fit_are_counted():
    table = alignment_table(torch.rand(3, 60), ["a", "b", "c"], ["x"] * 60)
    shown = lines(table, width=42)
    assert "and 40 more columns than there is room for" in shown
    assert max(map(len, shown[:4])) == 42
    assert not any("more columns" in line for line in lines(table, width=122))


def test_long_row_names_are_cut():
    shown = lines(alignment_table([[1.0]], ["x" * 50], ["a"]))
    assert shown[1].startswith("x" * 19 + "…│9")


def test_markup_in_tokens_is_text():
    shown = lines(alignment_table(torch.eye(2), ["[bold]", ":smile:"], ["[/]", "[red]"]))
    assert shown[0].strip() == "[/] [red]"
    assert shown[1].startswith(" [bold]│")


def test_nan_is_a_question_mark():
    weights = [[float("nan"), 0.5], [float("inf"), 0.25]]
    assert [line[2:].strip() for line in lines(alignment_table(weights, ["a", "b"], ["c", "d"]))[1:3]] == ["? 9", "? 5"]
    cells = coloured_cells(alignment_table(weights, ["a", "b"], ["c", "d"]))
    assert cells[1][2:4] == [None, None]


def test_only_zeros():
    assert lines(alignment_table(torch.zeros(1, 2), ["a"], ["b", "c"]))[1] == "a│. . "


def test_spaces_are_visible():
    assert "␣" in lines(alignment_table([[1.0]], ["a"], [" "]))[0]


def test_weights_that_do_not_fit():
    with pytest.raises(ShapeError, match="weights is 2 × 2, but there are 1 rows and 2 columns"):
        alignment_table(torch.eye(2), ["a"], ["b", "c"])
