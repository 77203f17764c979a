"""The explanation of each code of the doctor, of sources and of running models, and its entry in the documentation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Literal
from urllib.parse import urlsplit

from .diagnosis import UNREADABLE
from .doctor_error import DoctorError, nearest
from .finding import Severity
from .mistake_texts import texts_in
from .rules import RULES
from .run_explanations import KINDS, run_text

PAGE = "mistakes.html"
"""The page of the documentation with an entry for each code, whose anchor is the code."""
Language = Literal["en", "ko"]
LABELS = {
    "en": ("Wrong", "Right", "Source", "In the documentation"),
    "ko": ("틀린 예", "올바른 예", "출처", "문서"),
}
"""What stands before the examples, the source, and the address of the page."""


@dataclass(frozen=True, slots=True)
class CodeExplanation:
    """What a code means, in the first line of `text`, and why; the examples and the source may be empty.

    language: that of the text, "en" or "ko"; examples and sources are the same in both.
    """

    code: str
    severity: Severity
    text: str
    wrong: str = ""
    right: str = ""
    source: str = ""
    language: Language = "en"

    @property
    def summary(self) -> str:
        """The first line of the text."""
        return self.text.partition("\n")[0]

    @property
    def details(self) -> str:
        """The text after its first line."""
        return self.text.partition("\n")[2].strip()

    @property
    def markdown(self) -> str:
        """Text, examples and source in Markdown, without a heading."""
        parts = [self.text]
        if self.wrong:
            parts += ["Wrong:", f"```py\n{self.wrong}\n```", "Right:", f"```py\n{self.right}\n```"]
        return "\n\n".join([*parts, f"Source: {self.source}"] if self.source else parts)

    def __str__(self) -> str:
        wrong, right, source, documentation = LABELS[self.language]
        parts = [f"{self.code} ({self.severity.value}): {self.text}"]
        if self.wrong:
            parts += [f"{wrong}:", indent(self.wrong, "    "), f"{right}:", indent(self.right, "    ")]
        parts += [f"{source}: {self.source}"] if self.source else []
        folder = "ko/" if self.language == "ko" else ""
        return "\n\n".join([*parts, f"{documentation}: {folder}{page_address(self.code)}"])


def explanation(code: str, language: Language = "en") -> CodeExplanation:
    """The explanation of a code, in upper or lower case, in English or in Korean; of a rule of your own in English.

    Raises:
        DoctorError: there is no such code.

    >>> explanation("att111").summary
    'The softmax normalizes another axis than that of the keys, over which the values are summed.'
    >>> explanation("att102", "ko").summary
    '내적에 1/√d를 두 번 곱합니다.'
    """
    explained = _in_english(code)
    korean = texts_in(Path(__file__).with_name("korean_explanations.md")).get(explained.code)
    if language == "en" or korean is None:
        return explained
    return replace(explained, text=korean.reason, language=language)


def _in_english(code: str) -> CodeExplanation:
    """The explanation as it stands with the rules."""
    found = code.upper()
    if found == UNREADABLE:
        text = "A file cannot be read.\n\nIt does not parse, is not text in its encoding, or is too large. The other "
        return CodeExplanation(found, Severity.ERROR, f"{text}files were read.")
    if found in RULES:
        rule = RULES[found]
        return CodeExplanation(found, rule.severity, rule.explanation, rule.wrong, rule.right, rule.source)
    if found not in KINDS:
        raise DoctorError(f"unknown code {code!r}; {nearest(found, explained_codes())}")
    (name, severity), run = KINDS[found], run_text(found)
    return CodeExplanation(found, severity, f"{name.capitalize()}.\n\n{run.reason}", run.wrong, run.right, run.source)


def explained_codes() -> list[str]:
    """All codes: of rules, of running models, and of files that cannot be read."""
    return sorted([UNREADABLE, *RULES, *KINDS])


def page_address(code: str, documentation: str = "") -> str:
    """The address of a code's entry: relative to the documentation, or absolute where that has an address.

    >>> page_address("ATT101"), page_address("ATT101", "https://docs.example/regard")
    ('mistakes.html#ATT101', 'https://docs.example/regard/mistakes.html#ATT101')
    """
    return f"{documentation.rstrip('/')}/{PAGE}#{code}" if documentation else f"{PAGE}#{code}"


def check_documentation(address: object, *, where: str) -> str:
    """The address of the documentation's folder, checked.

    Raises:
        DoctorError: no absolute address.
    """
    if isinstance(address, str) and urlsplit(address).scheme in ("http", "https", "file"):
        return address
    raise DoctorError(
        f"documentation in {where} is {address!r}; it needs the address of the documentation's folder, as "
        '"https://HOST/regard" or "file:///FOLDER/build/site"'
    )
