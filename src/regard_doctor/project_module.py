"""Files of the same project that a file imports from: what they define, found without importing anything."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from .python_source import UnreadableSource, decoded, parsed, read_bytes

Defined: TypeAlias = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_ABOVE = 4
"""Folders above a file in which a module that it imports is looked for."""
_RENAMED = 3
"""Files that pass a name on, as an `__init__.py` does, before its definition."""


@dataclass(frozen=True, slots=True, eq=False)
class ProjectModule:
    """A file: where it is, the qualified names of what it imports, and its classes and functions by their names."""

    path: Path
    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, Defined] = field(default_factory=dict)

    def definition(self, name: str, renamed: int = _RENAMED) -> Definition | None:
        """The class or function that a name of this file stands for, here or in a file that it is imported from."""
        if name in self.definitions:
            return Definition(self.definitions[name], self)
        module, _, original = self.imports.get(name, "").rpartition(".")
        path = _file_of(module, self.path) if module and renamed else None
        imported = _read(path) if path is not None else None
        return imported.definition(original, renamed - 1) if imported is not None else None


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """A class or a function, and the file that it stands in."""

    node: Defined
    module: ProjectModule


def _file_of(module: str, importer: Path) -> Path | None:
    """The file of a dotted module: beside the file that imports it, or below one of the folders above."""
    parts = [part for part in module.split(".") if part]
    for folder in list(importer.absolute().parents)[: _ABOVE + 1]:
        found = folder.joinpath(*parts)
        for path in (found.with_suffix(".py"), found / "__init__.py"):
            if path.is_file() and path != importer.absolute():
                return path
    return None


@lru_cache(maxsize=64)
def _read(path: Path) -> ProjectModule | None:
    try:
        tree = parsed(decoded(read_bytes(path)))
    except UnreadableSource:
        return None  # it is reported where it is itself among the files that are read
    module = ProjectModule(path)
    for node in tree.body:
        if isinstance(node, Defined):
            module.definitions[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            module.imports.update({one.asname or one.name: f"{node.module or ''}.{one.name}" for one in node.names})
    return module
