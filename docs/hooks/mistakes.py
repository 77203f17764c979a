"""The page of mistakes: a line `::: codes` of mistakes.md becomes an entry for each code of the doctor, by subject.

Texts, examples and sources are those that `regard doctor --explain CODE --lang LANGUAGE` prints.
"""

import re
from collections.abc import Iterator
from typing import Any

from regard.utils.bilingual import Wording
from regard_doctor.code_explanation import LABELS, CodeExplanation, Language, explained_codes, explanation

PLACE = re.compile(r"^::: codes$", flags=re.MULTILINE)
SUBJECTS = {
    "ATT1": Wording("Scale and softmax", "스케일과 소프트맥스"),
    "ATT2": Wording("Masks", "마스크"),
    "ATT3": Wording("Dropout and precision", "드롭아웃과 정밀도"),
    "ATT4": Wording("Heads and layouts", "헤드와 배치 순서"),
    "ATT5": Wording("Positions and caches", "위치와 캐시"),
    "ATT6": Wording("Speed", "속도"),
    "ATT9": Wording("Style", "쓰는 방식"),
    "RUN": Wording("In a running model", "실행되는 모델에서"),
    "ATT0": Wording("Files", "파일"),
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the line of the codes by their entries."""
    if page.file.src_uri not in ("mistakes.md", "mistakes.ko.md"):
        return markdown
    language = "ko" if page.file.src_uri.endswith(".ko.md") else "en"
    return PLACE.sub(lambda _: "\n\n".join(entries(language)), markdown)


def entries(language: Language) -> Iterator[str]:
    """A heading for each subject, with the entries of its codes, in Markdown."""
    codes = explained_codes()
    if unknown := [code for code in codes if not code.startswith(tuple(SUBJECTS))]:
        raise ValueError(f"no subject for {', '.join(unknown)}: add their beginning to SUBJECTS")
    for beginning, subject in SUBJECTS.items():
        yield f"## {subject.text(language)}"
        yield from (entry(explanation(code, language)) for code in codes if code.startswith(beginning))


def entry(explained: CodeExplanation) -> str:
    """One code: an anchor, its severity, what is wrong, two examples, and the source."""
    wrong, right, source, _ = LABELS[explained.language]
    summary = explained.summary.rstrip(".")
    parts = [f"### {explained.code}: {summary} {{ #{explained.code} }}", f"*{explained.severity.value}*"]
    parts += [explained.details] if explained.details else []
    if explained.wrong:
        parts += [f"{wrong}:", f"```py\n{explained.wrong}\n```", f"{right}:", f"```py\n{explained.right}\n```"]
    if explained.source:
        parts.append(f"{source}: " + re.sub(r"https?://[^\s;,]+", r"<\g<0>>", explained.source))
    return "\n\n".join(parts)
