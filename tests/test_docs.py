"""The examples of docs/ run as they stand, each page from top to bottom, and print what they say."""

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text("utf-8"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_examples_of_a_page(page):
    text = "\n".join(match.group(1) for match in BLOCK.finditer(page.read_text("utf-8")))
    example = doctest.DocTestParser().get_doctest(text, {"__name__": "example"}, page.name, str(page), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(example, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_there_is_a_page_for_each_part_that_users_extend():
    names = {page.stem for page in PAGES if page.parent.name == "extending"}
    assert names >= {"mask", "score", "bias", "kernel", "lens", "operator", "model_family"}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_and_names_of_files_are_there(page):
    text = page.read_text("utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    if page.stem == "architecture" or page.parent.name == "extending":
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text):
            root = DOCS.parent if name.startswith("tests/") else DOCS.parent / "src" / "regard"
            assert (root / name).exists(), name


SOURCES = DOCS.parent / "src" / "regard"
WORDS = {
    word
    for path in (*SOURCES.rglob("*.py"), *SOURCES.rglob("*.[ch]"), *(DOCS.parent / "tests").rglob("*.py"))
    for word in re.findall(r"\w+", path.read_text("utf-8"))
}


@pytest.mark.parametrize(
    "page", ["architecture.md", *(f"extending/{path.name}" for path in DOCS.glob("extending/*.md"))]
)
def test_names_in_the_text_are_in_the_code(page):
    """Functions, classes and constants that a page names: `name`, `Class.method` or `module.name(...)`."""
    text = BLOCK.sub("", (DOCS / page).read_text("utf-8"))
    named = re.findall(r"`([A-Za-z_][A-Za-z_0-9.]*)(?:\([^`]*\))?`", text)
    examples = "\n".join(BLOCK.findall((DOCS / page).read_text("utf-8")))
    known = WORDS | set(re.findall(r"\w+", examples))
    assert {name for name in named if not known.issuperset(name.split("."))} == set()
