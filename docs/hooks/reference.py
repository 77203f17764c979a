"""The API reference: a line `::: regard.room` of a page below api/ becomes all public names of that package.

Names are read from `__all__` of the imported package. Each is documented where it is defined, since a static reader
takes `regard.attention` for the file of that name and not for the function.
"""

import importlib
import inspect
import re
from typing import Any

DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", flags=re.MULTILINE)
PACKAGE = re.compile(r"^::: (regard[a-z_.]*)$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the line of a package by its docstring and one line for each of its public functions and classes."""
    if not page.file.src_uri.startswith("api/"):
        return markdown
    return PACKAGE.sub(lambda match: "\n\n".join(_lines(match.group(1))), markdown)


def _with_fences(text: str) -> str:
    """Put each doctest between ```pycon and ```: without a fence, Markdown reads `>>>` as a quotation."""
    return DOCTEST.sub(lambda match: f"```pycon\n{match.group()}\n```", text)


def _lines(package: str) -> list[str]:
    module = importlib.import_module(package)
    objects = [getattr(module, name) for name in module.__all__]
    documented = [obj for obj in objects if inspect.isclass(obj) or inspect.isfunction(obj)]
    return [
        _with_fences(inspect.getdoc(module) or ""),
        *(f"::: {obj.__module__}.{obj.__qualname__}" for obj in documented),
    ]
