"""The Korean pages keep to the words of the glossary, and end every sentence in one register."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.rglob("*.ko.md")} - {DOCS / "glossary.ko.md"})
CODE = re.compile(r"^```.*?^```$|^    .*?$|`[^`\n]*`", flags=re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \|([^|]*)\|$", flags=re.MULTILINE)
PLAIN = re.compile(
    r"[가-힣]*(?<![니마보])다(?=\*{0,2}[\"”’']?(?:[.:;)]? \||[.!?](?:\s|$|\)|\"|\*|<)))", flags=re.MULTILINE
)
"""A word in -다 at the end of a sentence or of a cell, but for -니다, -마다 and -보다."""
NOT_VERBS = {"다", "합시다"}
HANGUL = re.compile(r"[가-힣]")


def words() -> tuple[list[str], list[str]]:
    """The terms of the glossary, and the names in italics, which the pages do without."""
    rows = ROW.findall((DOCS / "glossary.ko.md").read_text("utf-8"))[1:]
    return [term.strip() for term, _ in rows], [name for _, names in rows for name in re.findall(r"\*([^*]+)\*", names)]


def prose(page: Path) -> str:
    """The text of a page without its code."""
    return CODE.sub("", page.read_text("utf-8"))


def other_names(text: str) -> list[str]:
    """The names in a text that the glossary does without; a term that contains one, as 멀티 쿼리, is none."""
    terms, others = words()
    for term in ("멀티 쿼리", *(term for term in terms if any(name in term for name in others))):
        text = text.replace(term, "")
    return [name for name in others if name in text]


def test_the_glossary_names_the_words_that_have_several():
    terms, others = words()
    assert {"매개변수", "편향", "창", "사인 함수 위치", "회전 위치", "순전파", "역전파"} <= {*terms}
    assert {"파라미터", "바이어스", "윈도", "사인파", "로터리", "순방향", "역방향"} <= {*others}
    assert other_names("로터리와 교차 어텐션, 파라미터, 멀티 쿼리") == ["교차 어텐션", "파라미터", "로터리"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_korean_page_has_the_words_of_the_glossary(page):
    found = {line: other_names(line) for line in prose(page).splitlines()}
    assert {line: names for line, names in found.items() if names} == {}


@pytest.mark.parametrize("page", [*PAGES, DOCS / "glossary.ko.md"], ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_korean_page_has_one_register(page):
    """합니다체, in tables too."""
    assert [match.group() for match in PLAIN.finditer(prose(page)) if match.group() not in NOT_VERBS] == []


def test_a_plain_ending_is_found():
    assert [match.group() for match in PLAIN.finditer("| W_o | 섞는다 |\n같다. 같습니다. 어제보다 낫다!")] == [
        "섞는다",
        "같다",
        "낫다",
    ]


def test_texts_of_steps_are_in_the_same_words_and_register():
    from regard.steps import EXAMPLES
    from regard.steps.example_notes import NOTES
    from regard.steps.step_mistakes import MISTAKES
    from regard.steps.wording import STEPS

    said = [one.title for one in (*STEPS.values(), *EXAMPLES.values())]
    said += [*NOTES.values(), *(mistake.said for mistakes in MISTAKES.values() for mistake in mistakes)]
    for wording in said:
        assert HANGUL.search(wording.ko) or wording.ko == wording.en, wording
        assert other_names(wording.ko) == [], wording
        assert not re.search(r"(?<!니)다$", wording.ko), wording


def test_the_rules_of_the_doctor_are_all_in_korean():
    row = re.compile(r"^\| `(ATT\d+)` \| (\w+) \| .+ \|$", flags=re.MULTILINE)
    english, korean = (row.findall((DOCS / f"doctor{suffix}.md").read_text("utf-8")) for suffix in ("", ".ko"))
    assert korean == english


def test_every_explanation_of_the_doctor_is_in_korean_and_names_the_same_code():
    """In the words and the register of the pages, with each name of the English text, and the table's first lines."""
    from regard_doctor.code_explanation import explained_codes, explanation

    table = dict(
        re.findall(r"^\| `(ATT\d+)` \| \w+ \| (.+) \|$", (DOCS / "doctor.ko.md").read_text("utf-8"), re.MULTILINE)
    )
    for code in explained_codes():
        english, korean = explanation(code), explanation(code, "ko")
        assert {*re.findall(r"`[^`]+`", korean.details)} == {*re.findall(r"`[^`]+`", english.details)}, code
        assert korean.summary in table.get(code, korean.summary), code
        assert (korean.wrong, korean.right, korean.source) == (english.wrong, english.right, english.source)
        said = CODE.sub("", korean.text)
        assert other_names(said) == [], code
        assert [match.group() for match in PLAIN.finditer(said) if match.group() not in NOT_VERBS] == [], code
        assert HANGUL.search(korean.details), code
