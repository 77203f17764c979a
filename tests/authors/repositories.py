"""Code of the authors of mechanisms: `REGARD_AUTHORS` names a folder with clones of their repositories."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def clone(repository: str) -> Path:
    """The folder of a clone; a test without one is skipped."""
    folder = os.environ.get("REGARD_AUTHORS")
    if not folder:
        pytest.skip(f"REGARD_AUTHORS names no folder with a clone of {repository}", allow_module_level=True)
    path = Path(folder) / repository
    if not path.is_dir():
        pytest.skip(f"there is no clone of {repository} in {folder}", allow_module_level=True)
    return path


def file_of(repository: str, path: str) -> ModuleType:
    """One file as a module, without the package that it is of, which may need a GPU."""
    file = clone(repository) / path
    spec = importlib.util.spec_from_file_location(f"authors_{file.parent.name}_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        pytest.skip(f"{path} of {repository} needs {error.name}")
    return module


def part_of(repository: str, package: str, part: str) -> ModuleType:
    """A subpackage, without what the package itself imports."""
    folder = clone(repository) / package
    if package not in sys.modules:
        bare = ModuleType(package)
        bare.__path__ = [str(folder)]
        sys.modules[package] = bare
    try:
        return importlib.import_module(f"{package}.{part}")
    except ModuleNotFoundError as error:
        pytest.skip(f"{part} of {repository} needs {error.name}", allow_module_level=True)
