"""Formulas of the pages, LaTeX between dollars, as MathML: nothing is loaded, and no script runs to show them."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex leaves where a formula was: \( … \) in a span, \[ … \] in a div.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace each formula of a page, already in HTML, by MathML."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    block = match.group(1) == "div"
    formula = convert(html.unescape(match.group(2)).strip(), display="block" if block else "inline")
    return f'<div class="formula">{formula}</div>' if block else formula
