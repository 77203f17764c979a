"""The layout of a call that does not fit in its line, as Black and Ruff lay it out, so that they change nothing."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

WIDTH = 88
"""Columns of a line where a project sets no other number: that of Black and of Ruff."""


_SETTINGS = {"ruff.toml": [()], ".ruff.toml": [()], "pyproject.toml": [("tool", "ruff"), ("tool", "black")]}
"""Files that set a line length, and the tables in them that do."""


def line_width(path: Path) -> int:
    """The line length of the nearest settings of Ruff or Black in the folder of a file or above.

    A file that is not TOML counts as one without settings: what reads the doctor's own settings says so.
    """
    for folder in path.resolve().parents:
        for name, tables in _SETTINGS.items():
            try:
                document = tomllib.loads((folder / name).read_text("utf-8"))
            except (OSError, ValueError):
                continue
            for table in tables:
                found = document
                for key in table:
                    found = found.get(key, {}) if isinstance(found, dict) else {}
                length = found.get("line-length") if isinstance(found, dict) else None
                if isinstance(length, int):
                    return length
            if name == "pyproject.toml":
                return WIDTH
    return WIDTH


def laid_out(code: str, before: str, after: str, width: int) -> str:
    """A call between the text before and after it in its line: on one line if it fits, else on several.

    Lines after the first have no indentation of the block around: LibCST adds it.

    >>> print(laid_out("attend(query, key, value)", "    y = ", "", 28))
    attend(
        query, key, value
    )
    """
    code = _joined(code)
    if len(before) + len(code) + len(after) <= width or "\n" in code:
        return code
    call = ast.parse(code, mode="eval").body
    if not isinstance(call, ast.Call) or not call.args + call.keywords:
        return code
    first = min(one.col_offset for one in (*call.args, *call.keywords))
    arguments = [ast.get_source_segment(code, one) or "" for one in (*call.args, *call.keywords)]
    indent, joined = len(before) - len(before.lstrip()), ", ".join(arguments)
    lines = [f"    {joined}"] if indent + 4 + len(joined) <= width else [f"    {one}," for one in arguments]
    return "\n".join((code[:first], *lines, ")"))


def _joined(code: str) -> str:
    """A call on one line, where it stands on several without a comment and without a comma after the last argument."""
    call = ast.parse(code, mode="eval").body if "\n" in code and "#" not in code else None
    if not isinstance(call, ast.Call) or code.rstrip(") \n").endswith(","):
        return code
    arguments = [ast.get_source_segment(code, one) or "" for one in (*call.args, *call.keywords)]
    return f"{ast.get_source_segment(code, call.func)}({', '.join(arguments)})"
