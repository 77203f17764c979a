"""The page of mistakes: a line `::: codes` of mistakes.md becomes an entry for each code of the doctor, by subject.

Texts, examples and sources are those that `regard doctor --explain CODE` prints.
"""

import re
from collections.abc import Iterator
from typing import Any

from regard_doctor.code_explanation import CodeExplanation, explained_codes, explanation

PLACE = re.compile(r"^::: codes$", flags=re.MULTILINE)
SUBJECTS = {
    "ATT1": "Scale and softmax",
    "ATT2": "Masks",
    "ATT3": "Dropout and precision",
    "ATT4": "Heads and layouts",
    "ATT5": "Positions and caches",
    "ATT6": "Speed",
    "ATT9": "Style",
    "RUN": "In a running model",
    "ATT0": "Files",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the line of the codes by their entries."""
    if page.file.src_uri != "mistakes.md":
        return markdown
    return PLACE.sub(lambda _: "\n\n".join(entries()), markdown)


def entries() -> Iterator[str]:
    """A heading for each subject, with the entries of its codes, in Markdown."""
    codes = explained_codes()
    if unknown := [code for code in codes if not code.startswith(tuple(SUBJECTS))]:
        raise ValueError(f"no subject for {', '.join(unknown)}: add their beginning to SUBJECTS")
    for beginning, subject in SUBJECTS.items():
        yield f"## {subject}"
        yield from map(entry, (explanation(code) for code in codes if code.startswith(beginning)))


def entry(explained: CodeExplanation) -> str:
    """One code: an anchor, its severity, what is wrong, two examples, and the source."""
    summary = explained.summary.rstrip(".")
    parts = [f"### {explained.code}: {summary} {{ #{explained.code} }}", f"*{explained.severity.value}*"]
    parts += [explained.details] if explained.details else []
    if explained.wrong:
        parts += ["Wrong:", f"```py\n{explained.wrong}\n```", "Right:", f"```py\n{explained.right}\n```"]
    if explained.source:
        parts.append("Source: " + re.sub(r"https?://[^\s;,]+", r"<\g<0>>", explained.source))
    return "\n\n".join(parts)
