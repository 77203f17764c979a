"""Doctests in docstrings as blocks of code: without a fence, Markdown reads `>>>` as a quotation."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).*)*", flags=re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """A griffe extension that puts each doctest between ```pycon and ```."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    return f"{match.group(1)}```pycon\n{match.group()}\n{match.group(1)}```"
