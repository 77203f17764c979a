"""Lessons of the course in both languages: all parts, commands that run, exercises that are marked, slides.

Their figures and slides in Chromium: explorer/test/site.browser.ts. Notebooks: tests/test_docs.py.
"""

import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from regard.exercises import CODING_EXERCISES
from regard.steps import EXAMPLES
from regard_command.app import app
from regard_doctor import RULES

DOCS = Path(__file__).parents[2] / "docs"
LESSONS = sorted((DOCS / "course").glob("[0-9]*.md"))
ENGLISH = [page for page in LESSONS if not page.name.endswith(".ko.md")]
BLOCK = re.compile(r"^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
HEADINGS = {
    "en": ["Goal", "The idea", "Read, and move", "Run", "Sheet", "Questions", "What goes wrong in practice", "Next"],
    "ko": ["목표", "핵심", "읽고 움직여 보기", "실행", "문제지", "질문", "실제로 잘못되는 것", "다음"],
}

specification = importlib.util.spec_from_file_location("slides_hook", DOCS / "hooks" / "slides.py")
assert specification is not None
assert specification.loader is not None
hook = importlib.util.module_from_spec(specification)
specification.loader.exec_module(hook)


def test_there_are_ten_lessons_which_lead_from_one_to_the_next():
    assert len(ENGLISH) == 10
    for suffix in (".md", ".ko.md"):
        pages = [page.with_suffix("").with_name(page.stem + suffix) for page in ENGLISH]
        for page, following in zip(pages, ENGLISH[1:], strict=False):
            assert f"]({following.name})" in page.read_text("utf-8").split("## ")[-1]
        index = (DOCS / "course" / f"index{suffix}").read_text("utf-8")
        assert [page.name for page in ENGLISH if f"]({page.name})" not in index] == []
        assert "](course/index.md)" in (DOCS / f"index{suffix}").read_text("utf-8")


def test_every_coding_exercise_is_set_by_a_lesson_and_listed_in_their_order():
    for lessons in (ENGLISH, [page for page in LESSONS if page not in ENGLISH]):
        texts = [page.read_text("utf-8") for page in lessons]
        assert [name for text in texts for name in re.findall(r"^regard exercise write (\S+)", text, re.MULTILINE)] == [
            *CODING_EXERCISES
        ]
        index = lessons[0].with_name("index" + "".join(lessons[0].suffixes)).read_text("utf-8")
        assert [name for name in CODING_EXERCISES if f"`{name}`" not in index] == []


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_a_lesson_has_all_its_parts(page):
    text = page.read_text("utf-8")
    language = "ko" if page.name.endswith(".ko.md") else "en"
    found = [heading for heading in re.findall(r"^## (.+)$", text, re.MULTILINE) if heading not in ("Code", "코드")]
    assert found == HEADINGS[language]
    assert sum(int(minutes) for minutes in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)) == 45
    assert len(re.findall(r"^::: steps ", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^### .+[?까]\??$", text, re.MULTILINE)) == 3
    assert text.count("<details") == text.count("</details>") == 3
    for topics in re.findall(r"--topic (\S+)", text):
        assert {*topics.split(",")} <= {*EXAMPLES}
    assert {*re.findall(r"regard exercise write (\S+)", text)} <= {*CODING_EXERCISES}
    assert {*re.findall(r"--explain (\S+)", text)} <= {*RULES}
    commands = re.findall(r"^regard (?:steps|exercise|doctor).*$", text, re.MULTILINE)
    assert len(commands) >= 5
    assert [one for one in commands if one.endswith(" --lang ko") != (language == "ko")] == []


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.stem, marks=[] if page in ENGLISH else [pytest.mark.slow]) for page in LESSONS],
)
def test_every_command_of_a_lesson_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """In one folder; what it says is in the language of the lesson."""
    monkeypatch.chdir(tmp_path)
    language = "ko" if page.name.endswith(".ko.md") else "en"
    lines = [line for block in BLOCK.findall(page.read_text("utf-8")) for line in block.splitlines()]
    assert len(lines) >= 6
    said = []
    for line in lines:
        program, *arguments = shlex.split(line)
        done = CliRunner().invoke(app, arguments)
        assert (program, done.exit_code) == ("regard", 0), f"{line}\n{done.stderr}"
        said.append(done.stdout)
    assert ("가중치" in said[0]) == (language == "ko")
    assert f'<html lang="{language}">' in (tmp_path / "sheet.html").read_text("utf-8")
    assert len(list(tmp_path.glob("class-[0-9]*.csv"))) == 20
    assert (tmp_path / "figure.html").stat().st_size > 10_000
    assert said[-1].startswith("ATT")
    assert ("올바른 예" in said[-1]) == (language == "ko")


@pytest.mark.parametrize("language", ["en", "ko"])
@pytest.mark.parametrize("name", CODING_EXERCISES)
def test_an_exercise_is_written_filled_in_and_marked(name, language, tmp_path, monkeypatch):
    """As a student does it: the empty file, one with a likely mistake in it, and the right one."""
    monkeypatch.chdir(tmp_path)
    exercise, file = CODING_EXERCISES[name], tmp_path / f"{name.replace('-', '_')}.py"

    def said(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["exercise", *arguments, "--lang", language])
        return done.exit_code, done.stdout

    assert said("write", name) == (0, f"{file.name}\n")
    assert said("check", file.name)[0] == 1
    first, solution = (
        f"# regard exercise {name}\n",
        exercise.solution.replace("import Tensor", "import Tensor\nimport math, torch"),
    )
    mistake = exercise.mistakes[0]
    wrong = solution
    for before, after in mistake.changes:
        wrong = wrong.replace(before, after)
    file.write_text(first + wrong, encoding="utf-8")
    code, marks = said("check", file.name)
    assert code == 1
    assert f"{mistake.said.text(language)}.\n" in marks
    file.write_text(first + solution, encoding="utf-8")
    assert said("check", file.name)[0] == 0


def page_of(name: str) -> SimpleNamespace:
    file = SimpleNamespace(
        src_uri=f"course/{name}", dest_uri="course/01-a.html", abs_dest_path="/site/course/01-a.html"
    )
    return SimpleNamespace(file=file, title="A & B")


def test_slides_have_one_heading_each_and_the_answers_can_be_opened():
    content = (
        '<h1 id="a">1. A<a class="headerlink" href="#a">¶</a></h1><p><a href="01-a-slides.html">Slides</a></p><p>x</p>'
        "<h2>Goal</h2><p>g</p><h2>Questions</h2><h3>Why?</h3><details><summary>Answer</summary><p>so</p></details>"
    )
    text = hook.slides("A & B", content, "ko")
    sections = re.findall(r"<section>(.*?)</section>", text, re.DOTALL)
    assert [re.findall(r"<h\d", section) for section in sections] == [["<h1"], ["<h2"], ["<h3"]]
    assert "<title>A &amp; B</title>" in text
    assert '<html lang="ko">' in text
    assert "headerlink" not in text
    assert "slides.html" not in text
    assert "<details>" in sections[2]
    assert "break-after: page" in text
    assert not re.search(r'(?:src|href)="https?:', text)


def test_a_lesson_leads_to_its_slides_and_another_page_has_none():
    assert hook.on_page_markdown("# A\n\ntext", page_of("01-a.md")).startswith(
        '# A\n\n<p><a href="01-a-slides.html">Slides of this lesson</a></p>\n'
    )
    assert "슬라이드" in hook.on_page_markdown("# A\n\ntext", page_of("01-a.ko.md"))
    assert hook.on_page_markdown("# A\n\ntext", page_of("index.md")) == "# A\n\ntext"
