"""Every Python block of the README runs as it stands and prints what it says."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text("utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(TEXT.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(TEXT)]
PARAMETERS = [pytest.param(line, block, id=f"line {line + 1}") for line, block in BLOCKS]
DOCS = README.parent / "docs"
MOST_LINES = 160  # what is read in some minutes; all else is in docs/


@pytest.mark.parametrize(("line", "block"), PARAMETERS)
def test_block_prints_what_it_says(line, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(block, {}, f"README.md:{line + 1}", str(README), line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(example, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_the_readme_has_examples_and_is_short():
    assert len(BLOCKS) == 6
    assert "make demo" in TEXT
    assert "make test" in TEXT
    assert TEXT.count("\n") <= MOST_LINES


def test_each_figure_of_the_readme_is_in_the_benchmarks():
    """Ratios are copied, digit for digit, and so become wrong where the page is measured anew: then this fails."""
    pages = "".join((DOCS / name).read_text("utf-8") for name in ("benchmarks.md", "gpu.md"))
    measured = set(re.findall(r"\d[\d.,]*\d|\d", pages))
    rows = re.findall(r"^\|(.*)\|$", TEXT.partition("## How fast")[2].partition("\n## ")[0], flags=re.MULTILINE)[2:]
    figures = [cell.strip() for row in rows for cell in row.split("|")[2:] if cell.strip()]
    assert len(rows) > 10
    assert [figure for figure in figures if figure not in measured] == []


def test_links_of_the_readme_are_there():
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]+)(?:#([^)]+))?\)", TEXT):
        assert (README.parent / target).exists(), target
        headings = (
            re.findall(r"^#+ (.+)$", (README.parent / target).read_text("utf-8"), flags=re.MULTILINE) if heading else []
        )
        assert not heading or heading in [re.sub(r"\W+", "-", one.lower()) for one in headings], heading


def test_modules_that_are_run_can_be():
    """`python -m regard.x` and `torchrun -m regard.x` need a module, or a package with `__main__`."""
    pages = [README, *sorted(DOCS.rglob("*.md"))]
    names = {name for page in pages for name in re.findall(r"-m\s+(regard[\w.]*)", page.read_text("utf-8"))}
    assert "regard.ring.demo" in names
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{name}.__main__"), name
