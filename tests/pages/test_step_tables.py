"""Tables that the examples of pages print become tables of HTML, in the language of the page."""

import doctest
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[2] / "docs"
specification = importlib.util.spec_from_file_location("step_tables_hook", DOCS / "hooks" / "step_tables.py")
assert specification is not None
assert specification.loader is not None
hook = importlib.util.module_from_spec(specification)
specification.loader.exec_module(hook)

PAGES = sorted((DOCS / "mechanisms").glob("*.ko.md"))


def shown(page: Path) -> str:
    return hook.on_page_markdown(page.read_text("utf-8"), SimpleNamespace(file=SimpleNamespace(src_uri=page.name)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_printed_table_is_one_of_html_in_korean(page):
    text = page.read_text("utf-8")
    wants = [
        example.want for block in hook.BLOCK.findall(text) for example in doctest.DocTestParser().get_examples(block)
    ]
    tables = [table for want in wants for table in hook.printed_tables(want)]
    html = shown(page)
    assert html.count('<div class="step-table"') == len(tables)
    assert "by hand:" not in html
    captions = re.findall(r"<caption>(.*?) <span", html)
    assert [caption for caption in captions if not re.search("[가-힣]", caption)] == []
    numbers = sum(len(row) - 1 for table in tables for row in table.rows)
    assert len(re.findall(r"<td>[^<]|<td><mark>", html)) == numbers
    assert shown(page.with_name(page.name.replace(".ko.md", ".md"))).count('<div class="step-table"') == len(tables)


def test_code_and_other_output_stay_as_they_are():
    block = '>>> for name in ("a", "b"):\n...     print(steps[name])\nScores    e\n'
    block += "      k1     k2\n  q1   1  0.500\n>>> 1 + 1\n2\n"
    html = hook.on_page_markdown(
        f"Text\n\n```python\n{block}```\n", SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    )
    assert html.startswith('Text\n\n```python\n>>> for name in ("a", "b"):\n...     print(steps[name])\n```\n\n<div')
    assert html.endswith("</div>\n\n```python\n>>> 1 + 1\n2\n```\n")
    plain = "```python\n>>> 1 + 1\n2\n```"
    assert hook.on_page_markdown(plain, SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))) == plain


def test_a_text_that_only_looks_like_a_table_is_none():
    for text in ("2\n", "a    b\nc\n", "Title    formula\n  k1  k2\n  q1  1\n", "    x  y\n  q  1  2\n", ""):
        assert hook.printed_tables(text) == []
