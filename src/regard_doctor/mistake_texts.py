"""The texts of mistakes, from Markdown beside the rules: why it is one, a source, a wrong and a right example.

A section stands for a code. Its examples are one patch: the lines of the wrong one are those without `+`, of the right
one those without `-`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MistakeText:
    """Why something is a mistake, where that is written, and both examples; these may be empty."""

    reason: str
    source: str
    wrong: str = ""
    right: str = ""


def read_section(section: str) -> MistakeText:
    r"""The text of one section, without its heading.

    >>> found = read_section("It is so.\n\n```diff\n-x = 1\n+x = 2\n print(x)\n```\n\nSource: a paper")
    >>> found.reason, found.wrong, found.right, found.source
    ('It is so.', 'x = 1\nprint(x)', 'x = 2\nprint(x)', 'a paper')
    """
    patch = re.search(r"```diff\n(.*?)```\n", section, re.DOTALL)
    source = re.search(r"^Source: (.*)$", section, re.MULTILINE)
    lines = patch[1].splitlines() if patch else []
    wrong, right = ("\n".join(line[1:] for line in lines if not line.startswith(other)) for other in "+-")
    prose = re.sub(r"```diff\n.*?```\n|^Source: .*$", "", section, flags=re.DOTALL | re.MULTILINE)
    return MistakeText(prose.strip(), source[1] if source else "", wrong, right)


@cache
def texts_in(path: Path) -> dict[str, MistakeText]:
    """The texts of all sections of a file, by their codes."""
    sections = re.split(r"^## (\w+)\n", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return {code: read_section(text) for code, text in zip(sections[::2], sections[1::2], strict=True)}
