"""Drawings in the pages: a line `::: drawing NAME` becomes the panels of that drawing, in the page's language.

They stand in the page itself, so that they take its colours and its letters, and their texts are found by the search.
"""

import re
from typing import Any

from mechanism_drawings import DRAWINGS

PLACE = re.compile(r"^::: drawing ([a-z-]+)$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each line of a drawing by its panels."""
    is_korean = page.file.src_uri.endswith(".ko.md")
    return PLACE.sub(lambda match: panels(match.group(1), is_korean=is_korean), markdown)


def panels(name: str, *, is_korean: bool) -> str:
    """A drawing as an element of a page: panels side by side where there is room, else below one another."""
    drawn = DRAWINGS[name](lambda english, korean: korean if is_korean else english)
    return f'<div class="drawing">{"".join(panel.svg() for panel in drawn)}</div>'
