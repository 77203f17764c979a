"""The code of a Jupyter notebook as one module, and the cell that each of its lines stands in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

from .finding import CodeFinding
from .python_source import UnreadableSource, parsed

SUFFIX = ".ipynb"
_MAGIC = re.compile(r"^(\s*)([%!?]|.*\?\s*$)")
"""Lines for IPython and not for Python: `%matplotlib inline`, `!pip install`, `help?`."""


@dataclass(frozen=True, slots=True)
class NotebookSource:
    """The code cells below each other, as a kernel runs them: what one defines, the next uses.

    cells: number of each code cell, from 1 over cells of all kinds, and its lines. broken: why cells do not parse, by
    their numbers; their lines are empty in the module.
    """

    cells: dict[int, list[str]]
    broken: dict[int, UnreadableSource]

    @property
    def module(self) -> str:
        """The source of all cells, as many lines as they have."""
        parts = (without_magic(cell) if n not in self.broken else [""] * len(cell) for n, cell in self.cells.items())
        return "".join(f"{line}\n" for lines in parts for line in lines)

    def placed(self, finding: CodeFinding) -> CodeFinding:
        """A finding in the module, with its cell, and its lines counted in that."""
        first = 1
        for number, cell in self.cells.items():
            if finding.line < first + len(cell):
                line, end_line = finding.line - first + 1, finding.end_line - first + 1
                return replace(finding, cell=number, line=line, end_line=min(end_line, len(cell)))
            first += len(cell)
        return finding


def notebook_source(text: str) -> NotebookSource:
    r"""The code of a notebook, from its JSON.

    Raises:
        UnreadableSource: the text is not JSON, or no notebook of format 4.

    >>> cells = [{"cell_type": "markdown", "source": "# Title"}, {"cell_type": "code", "source": ["%time\n", "x = 1"]}]
    >>> notebook_source(json.dumps({"nbformat": 4, "cells": cells})).module
    '\nx = 1\n'
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableSource(f"is no notebook: it is not JSON ({error}); save it again from Jupyter") from None
    if not isinstance(document, dict) or not isinstance(document.get("cells"), list):
        raise UnreadableSource(
            "is no notebook of format 4, which has a list of cells; `jupyter nbconvert` converts others"
        )
    cells: dict[int, list[str]] = {}
    for number, cell in enumerate(document["cells"], 1):
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            cells[number] = _written(cell.get("source", "")).splitlines() or [""]
    return NotebookSource(cells, {number: fault for number, cell in cells.items() if (fault := _fault(cell))})


def _written(source: object) -> str:
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        return "".join(source)
    return source if isinstance(source, str) else ""


def _fault(cell: list[str]) -> UnreadableSource | None:
    try:
        parsed("\n".join(without_magic(cell)))
    except UnreadableSource as error:
        return error
    return None


def without_magic(cell: list[str]) -> list[str]:
    r"""The lines of a cell, those for IPython replaced by `pass` or nothing; all of a cell in another language.

    >>> without_magic(["%%bash", "ls"]), without_magic(["if x:", "    !ls \\", "  -l"])
    (['', ''], ['if x:', '    pass', ''])
    """
    if cell[0].startswith(("%%time", "%%capture")):
        return ["", *without_magic(cell[1:])] if len(cell) > 1 else [""]
    if cell[0].startswith("%%"):
        return [""] * len(cell)
    lines, continued = [], False
    for line in cell:
        lines.append("" if continued else _plain(line))
        continued = line.rstrip().endswith("\\") and (continued or lines[-1] != line)
    return lines


def _plain(line: str) -> str:
    found = _MAGIC.match(line)
    if found is None or line.lstrip().startswith("#"):
        return line
    return f"{found[1]}pass" if found[1] else ""
