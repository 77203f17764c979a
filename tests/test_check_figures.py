"""recipes/check_figures.py finds a digit that a page has changed, and knows what each spread allows."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load_recipe():
    specification = importlib.util.spec_from_file_location("check_figures", ROOT / "recipes" / "check_figures.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["check_figures"] = module  # where dataclasses look their annotations up
    specification.loader.exec_module(module)
    return module


figures = load_recipe()

TABLE = """\
## Movies

| | recall@10 | NDCG@10 |
| --- | ---: | ---: |
| popularity | 0.149 | 0.097 |
| attention by the profile | 0.287 | 0.220 |
"""
PRINTED = """\
                      recall@10  NDCG@10
popularity                0.149    0.097
attention                 0.287    0.220
"""
COMPARED = """\
## Scores

| score | BLEU | 95 % interval | against dot | p | CPU s | parameters |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
| dot | 20.17 | 17.33 to 23.01 | | | 26.9 | 434,236 |
| scaled_dot | 18.64 | 16.50 to 20.79 | -1.52 | <0.01 | 26.1 | 434,236 |
"""


@pytest.fixture
def checked(tmp_path, capsys):
    """A function of a page, an output and a spread, which returns the exit code and what is printed."""

    def run(page: str, output: str | None, spread: str, processor: str = "", name: str = "one.txt") -> tuple[int, str]:
        docs, printed = tmp_path / "docs", tmp_path / "printed"
        docs.mkdir(exist_ok=True)
        printed.mkdir(exist_ok=True)
        section = page.splitlines()[0].removeprefix("## ")
        row = f"| `{name}` | page.md | {section} | {spread} | {processor} |"
        head = "| output | page | tables under | spread | measured on |\n| --- | --- | --- | --- | --- |\n"
        (docs / "figures.md").write_text(f"# Figures\n\n{head}{row}\n", encoding="utf-8")
        (docs / "page.md").write_text(page, encoding="utf-8")
        if output is not None:
            (printed / name).write_text(output, encoding="utf-8")
        code = figures.main(["--docs", str(docs), "--printed", str(printed)])
        return code, capsys.readouterr().out

    return run


def test_the_same_digits(checked):
    code, text = checked(TABLE, PRINTED, "same digits")
    assert (code, "4 equal\n" in text) == (0, True)


@pytest.mark.parametrize(("digit", "changed"), [("0.149", "0.148"), ("0.220", "0.221"), ("0.287", "0.387")])
def test_a_changed_digit_is_found_with_its_page_and_line(checked, digit, changed):
    code, text = checked(TABLE.replace(digit, changed), PRINTED, "same digits")
    assert code == 1
    assert "3 equal" in text
    assert "1 outside" in text
    line = 5 if digit == "0.149" else 6
    assert f"page.md:{line}: " in text
    assert f"{changed}, printed {digit}" in text


def test_a_row_that_nothing_printed_has(checked):
    code, text = checked(TABLE + "| something else | 12.5 | 77.1 |\n", PRINTED, "same digits")
    assert code == 1
    assert "page.md:7: something else: no such row in one.txt" in text


def test_a_section_that_is_gone(checked, tmp_path):
    checked(TABLE, PRINTED, "same digits")
    page = tmp_path / "docs" / "page.md"
    page.write_text(TABLE.replace("## Movies", "## Films"), encoding="utf-8")
    assert figures.main(["--docs", str(tmp_path / "docs"), "--printed", str(tmp_path / "printed")]) == 1


def test_what_was_not_run_is_said(checked):
    code, text = checked(TABLE, None, "same digits")
    assert code == 0
    assert "one.txt, page.md, Movies: 1 not run" in text


def test_an_output_that_has_another_section_alone(checked, tmp_path):
    page = f"{TABLE}\n## Films\n\n{TABLE[TABLE.index('|') :]}"
    code, text = checked(page, page[page.index("## Films") :].replace("0.149", "0.999"), "same digits")
    assert (code, "Movies: 1 not run" in text) == (0, True)


def test_a_printed_number_is_rounded_to_the_decimals_of_the_page(checked):
    exact = PRINTED.replace("0.149", "0.148651").replace("0.287", "0.28749")
    assert checked(TABLE, exact, "same digits")[0] == 0
    assert checked(TABLE, exact.replace("0.148651", "0.14839"), "same digits")[0] == 1


def test_a_difference_that_is_allowed(checked):
    other = PRINTED.replace("0.287", "0.297")
    code, text = checked(TABLE, other, "± 0.01")
    assert code == 0
    assert "1 within the spread" in text
    assert checked(TABLE, other, "± 0.009")[0] == 1


def test_shares_in_percent_and_others_have_spreads_of_their_own(checked):
    page = TABLE.replace("0.149", "14.9 %")
    printed = PRINTED.replace("0.149", "16.9%")
    assert checked(page, printed, "± 3 % or 0.01")[0] == 0
    assert checked(page, printed.replace("0.220", "0.235"), "± 3 % or 0.01")[0] == 1
    assert checked(page, printed, "± 1 % or 5")[0] == 1


def test_rows_are_told_apart_where_names_resemble_each_other(checked):
    swapped = "scaled_dot  18.64\ndot  20.17\n"
    page = "## S\n\n| score | BLEU |\n| --- | --- |\n| dot | 20.17 |\n| scaled_dot | 18.64 |\n"
    assert checked(page, swapped, "same digits")[0] == 0


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("20.17", "20.17"), 0),
        (("20.17", "22.90"), 0),  # in the interval of the page
        (("20.17", "23.10"), 1),
        (("17.33 to 23.01", "17.00 to 23.40"), 0),  # follows the figure
        (("-1.52", "-1.49"), 0),
        (("434,236", "434,237"), 1),
        (("26.9", "39.0"), 0),
        (("26.9", "41.0"), 1),  # more than half as long again
    ],
)
def test_an_interval_over_seeds(checked, change, code):
    printed = COMPARED.replace(*change)
    found, text = checked(COMPARED, printed, "interval, times within 1.5", figures.this_processor())
    assert found == code, text


def test_an_interval_that_is_printed_beside_a_figure_counts_too(checked):
    page = "## L\n\n| | 32 lines | 64 |\n| --- | --- | --- |\n| ALiBi | 96.8 % | 44.2 % (43-45) |\n"
    assert checked(page, "ALiBi  97.2% (97-98)  44.9% (44-46)\n", "interval")[0] == 0
    assert checked(page, "ALiBi  98.2% (98-98)  44.9% (44-46)\n", "interval")[0] == 1


def test_times_of_another_processor_are_not_compared(checked):
    code, text = checked(COMPARED, COMPARED.replace("26.9", "92.6"), "interval, times within 1.5", "another one")
    assert code == 0
    assert "1 of another processor" in text


def test_one_training_is_another_one_on_another_processor(checked):
    printed = COMPARED.replace("20.17", "23.10")
    code, text = checked(COMPARED, printed, "one training", "another one")
    assert code == 0
    assert "of another processor" in text
    assert checked(COMPARED, printed, "one training", figures.this_processor())[0] == 1
    assert checked(COMPARED, COMPARED, "one training", figures.this_processor())[0] == 0


@pytest.mark.parametrize("heading", ["CPU s", "seconds", "words/s", "words a second in training", "memory"])
def test_what_counts_as_measured(checked, heading):
    page = f"## D\n\n| score | right | {heading} |\n| --- | --- | --- |\n| dot | 99.9 % | 7,621 |\n"
    printed = page.replace("7,621", "2,927")
    assert checked(page, printed, "± 3 %, times within 1.5", "another one")[0] == 0
    assert checked(page, printed, "± 3 %, times within 1.5", figures.this_processor())[0] == 1
    assert checked(page.replace(heading, "parameters"), printed, "± 3 %, times within 1.5", "another one")[0] == 1


def test_columns_are_found_by_their_headings(checked):
    printed = """\
| score | seconds | BLEU | 95 % interval | against dot | p | CPU s | memory | parameters |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| dot | 26.9 | 20.17 | 17.33 to 23.01 | | | 99.0 | 174 MiB | 434,236 |
| scaled_dot | 3 | 18.64 | 16.50 to 20.79 | -1.52 | <0.01 | 26.1 | 174 MiB | 434,236 |
"""
    code, text = checked(COMPARED, printed, "interval, times within 1.5", figures.this_processor())
    assert code == 1
    assert "26.9, printed 99.0" in text
    assert "1 outside" in text


def test_a_benchmark_whose_columns_and_rows_have_the_same_names(checked):
    page = """\
## Masks

| mask | pairs | regard | ratio | its peak | ratio | more |
| --- | --- | --- | --- | --- | --- | --- |
| window | causal | 635.4 ms | 32 | 1,187 MiB | 9.13 | -1.0% |
| window | all pairs | 1,268.0 ms | 58 | 1,186 MiB | 9.06 | +2.0% |
"""
    spread, processor = "times within 1.5", figures.this_processor()
    faster = page.replace("635.4", "500.0").replace("1,268.0", "900.0").replace("-1.0%", "+9.0%")
    code, text = checked(page, f"Zen 5\n\n### One\n\n{faster[faster.index('|') :]}", spread, processor)
    assert (code, "7 equal, 3 within" in text) == (0, True), text
    assert checked(page, faster.replace("| 9.13 |", "| 5.13 |"), spread, processor)[0] == 1
    assert checked(page, faster.replace("| 9.13 |", "| 5.13 |"), spread)[0] == 0


def test_cells_without_numbers(checked):
    page = "## Z\n\n| class | future | cache |\n| --- | --- | --- |\n| Bert | – | ✗ |\n| Llama | | ✗ |\n"
    assert checked(page, page, "same digits", name="zoo.md")[0] == 0
    code, text = checked(page, page.replace("| Bert | – |", "| Bert | ✗ |"), "same digits", name="zoo.md")
    assert code == 1
    assert "Bert: future '–', printed '✗'" in text


def test_pictures_are_the_same_file_or_not(checked, tmp_path):
    for folder, content in (("docs", b"one"), ("printed/docs", b"two")):
        for name in ("a.png", "mechanisms/b.png"):
            path = tmp_path / folder / "pictures" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if name == "a.png" else b"same")
    _, text = checked(TABLE, PRINTED, "same digits")
    assert "pictures/a.png: another file" in text
    assert "1 pictures the same file, 1 pictures another file" in text


def test_every_output_of_the_table_is_of_a_section_that_has_tables():
    """And the Makefile writes each."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    entries = figures.entries(ROOT / "docs" / "figures.md")
    assert len(entries) > 30
    for entry in entries:
        rows = figures.rows_of((ROOT / "docs" / entry.page).read_text("utf-8"))
        assert figures.in_section(rows, entry.section), entry
        assert figures.Spread(entry.spread, here=True).text.startswith(
            ("same digits", "one training", "±", "interval", "times within")
        )
        assert Path(entry.output).name in makefile or entry.output.startswith(("bench-", "compare-")), entry.output
