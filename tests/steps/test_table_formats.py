import csv
import io
import json
from html.parser import HTMLParser

import pytest
import torch

from regard.errors import ConfigurationError
from regard.steps import WhatIf, walkthrough, worked_example
from regard.steps.table_formats import ROUNDING, number_text, text_width


@pytest.fixture
def steps():
    query, key, value = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[4.0], [2.0]])
    return walkthrough(query, key, value, queries=["나는"], keys=["a|b", "<c>"])


def test_columns_align_where_characters_are_wide(steps):
    lines = steps["weights"].__str__().splitlines()
    assert lines[1:3] == ["          a|b    <c>  sum", "  나는  0.670  0.330    1"]
    assert text_width(lines[1]) == text_width(lines[2])


def test_korean_titles(steps):
    assert "질의(Query) Q" in steps.text("ko")
    assert "문맥 벡터" in steps.markdown("ko")
    assert "어텐션 점수" in steps.html("ko")


def test_markdown_escapes_bars_and_csv_quotes(steps):
    assert "| | a\\|b | <c> | sum |" in steps.markdown()
    rows = list(csv.reader(io.StringIO(steps.csv())))
    at = rows.index(["Attention weights: softmax of each row", "a_ij = exp(e_ij) / Σ_k exp(e_ik)"])
    assert rows[at + 1 : at + 3] == [["", "a|b", "<c>", "sum"], ["나는", "0.669762", "0.330238", "1"]]


class Tags(HTMLParser):
    """Opened and closed tags, and the texts of cells."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th", "mark"):
            self.texts.append(data)


def test_html_is_balanced_escaped_and_marks_changes(steps):
    changed = walkthrough(*(torch.eye(2),) * 3, what_if=WhatIf(flip=[(0, 1)])).compared(
        walkthrough(*(torch.eye(2),) * 3)
    )
    tags = Tags()
    tags.feed(steps.html())
    assert tags.open == []
    assert "<c>" in tags.texts
    assert "<mark>" not in steps.html()
    assert "<mark>1</mark>" in changed.html()
    assert "**1**" in changed.markdown()


def test_a_long_vector_is_cut_in_text_and_whole_in_csv_and_json():
    steps = walkthrough(torch.ones(1, 20), torch.ones(2, 20), torch.ones(2, 3))
    assert "… 14 more" in steps.text()
    assert "… 외 14개" in steps.text("ko")
    assert ",".join(map(str, range(1, 21))) in steps.csv()
    assert len(steps.to_json()["tables"][0]["numbers"][0]) == 20


def test_json_round_trip_with_minus_infinity():
    steps = walkthrough(*(torch.eye(2),) * 3, mask=torch.tensor([[True, False], [True, True]]))
    tables = {table["key"]: table for table in json.loads(json.dumps(steps.to_json()))["tables"]}
    assert tables["masked_scores"]["numbers"][0][1] == "-inf"
    assert tables["masked_scores"]["title"] == {"en": "Scores with the mask", "ko": "마스크를 적용한 점수"}


@pytest.mark.parametrize("render", ["text", "markdown", "csv", "html"])
def test_an_unknown_language_is_refused(steps, render):
    with pytest.raises(ConfigurationError, match="language is 'de'; did you mean 'en'. Known: 'en', 'ko'"):
        getattr(steps, render)("de")


@pytest.mark.parametrize("digits", [3, 6])
@pytest.mark.parametrize("whole", [1, -1, 2, 20, 49])
def test_a_whole_number_is_printed_as_such_whatever_rounding_left_of_it(whole, digits):
    for error in (-ROUNDING, -1e-7, 0.0, 1e-7, ROUNDING):
        assert number_text(whole * (1 + 0.99 * error), digits) == str(whole)


def test_what_is_near_a_whole_number_is_not_printed_as_one():
    numbers = 1 - 2e-5, 1 + 2e-5, 1000.002, 1e-7, -1e-7, 123456.5
    assert [number_text(number, 3) for number in numbers] == [
        "1.000",
        "1.000",
        "1000.002",
        "0.000",
        "0.000",
        "123456.500",
    ]


def test_weights_of_large_scores_sum_to_1():
    """They are exp(score - logsumexp) in kernels, both rounded to float32: sums are off by more than a digit."""
    scores = 80 - 3 * torch.rand(200, 5, dtype=torch.float64)
    lse = scores.logsumexp(-1, keepdim=True)
    sums = (scores.float() - lse.float()).exp().double().sum(-1)
    assert (sums - 1).abs().max() > 2e-6
    assert {number_text(total, 3) for total in sums.tolist()} == {"1"}


@pytest.mark.parametrize("language", ["en", "ko"])
def test_what_the_tables_do_not_say_is_printed_below_the_title(language):
    steps = worked_example("delta-rule")
    note = {"en": "φ(x) = x, and β_t = 1.", "ko": "φ(x) = x이고 β_t = 1입니다."}[language]
    assert steps.text(language).split("\n")[1] == note
    assert steps.markdown(language).split("\n\n")[1] == note
    assert list(csv.reader(io.StringIO(steps.csv(language))))[:2] == [[steps.title.text(language)], [note]]
    assert f"</h1>\n<p>{note}</p>\n<section" in steps.html(language)
    assert steps.to_json()["note"][language] == note
    assert "note" not in worked_example("luong-dot").to_json()
