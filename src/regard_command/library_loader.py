"""How the command loads torch and regard: without searching for garbage among objects that all stay."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

PACKAGES = ("regard", "torch")
"""`import regard` loads torch; some commands import torch first, or what loads it."""


class LibraryLoader(SourceFileLoader):
    """Loads a package while the garbage collector pauses, then sets all objects apart that are there.

    torch makes more than 200,000, and Python would search all of them several times on the way and again at the exit,
    which takes a third of the CPU time of a short command. What is made later is collected as ever.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Run the package's own code, which imports its modules."""
        if not gc.isenabled():  # within the import of the other package
            super().exec_module(module)
            return
        gc.disable()
        try:
            super().exec_module(module)
            gc.freeze()
        finally:
            gc.enable()


class LibraryFinder(PathFinder):
    """Has the packages loaded by `LibraryLoader`, whatever imports them first; stands in `sys.meta_path`."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a package is, as Python finds it; None for any other module."""
        spec = super().find_spec(fullname, path, target) if fullname in PACKAGES else None
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = LibraryLoader(fullname, spec.loader.path)
        return spec
