"""Every Python block of the README runs as it stands and prints what it says."""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

from regard import native

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text("utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
BLOCKS = [(TEXT.count("\n", 0, match.start(1)), match.group(1)) for match in BLOCK.finditer(TEXT)]
PARAMETERS = [
    pytest.param(line, block, id=f"line {line + 1}", marks=[pytest.mark.slow] if "train(" in block else [])
    for line, block in BLOCKS
]


@pytest.mark.parametrize(("line", "block"), PARAMETERS)
def test_block_prints_what_it_says(line, block, tmp_path, monkeypatch):
    if "# native code" in block and not native.available():
        pytest.skip(str(native.why_not()))
    monkeypatch.chdir(tmp_path)
    example = doctest.DocTestParser().get_doctest(block, {}, f"README.md:{line + 1}", str(README), line)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(example, out=report.append)
    assert result.attempted > 0
    assert result.failed == 0, "".join(report)


def test_the_readme_has_examples():
    assert len(BLOCKS) >= 5
    assert "make demo" in TEXT
    assert "make test" in TEXT


def test_modules_that_are_run_can_be():
    """`python -m regard.x` and `torchrun -m regard.x` need a module, or a package with `__main__`."""
    pages = [README, *sorted((README.parent / "docs").rglob("*.md"))]
    names = {name for page in pages for name in re.findall(r"-m\s+(regard[\w.]*)", page.read_text("utf-8"))}
    assert "regard.ring.demo" in names
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.submodule_search_locations is None or importlib.util.find_spec(f"{name}.__main__"), name
