r"""Code in tables: `a \| b` as `a | b`. GitHub needs the backslash, which the site's Markdown would show."""

import re
from typing import Any

CELL = re.compile(r"<td[^>]*>.*?</td>", flags=re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    r"""Take the backslash from each pipe in the tables of a page, already in HTML.

    >>> on_page_content(r"<td><code>causal() \| window(1, 1)</code></td><p>\|</p>")
    '<td><code>causal() | window(1, 1)</code></td><p>\\|</p>'
    """
    return CELL.sub(lambda match: match[0].replace("\\|", "|"), content)
