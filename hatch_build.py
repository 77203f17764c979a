"""While a wheel is built, so is the native code in it. Without a C compiler the wheel holds the reason instead.

An editable installation gets the variants of native code that this processor runs, a wheel all of its family.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = "src/regard/backends/cpu"


class NativeCode(BuildHookInterface):
    """Builds into the sources for an editable installation, and for any other beside them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = load(Path(self.root) / NATIVE / "build.py")
        if version == "editable":
            self._say(builder.build())
            return
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        reason = builder.build(folder, all_variants=True, keep=builder.kept_folder(editable=False))
        self._say(reason)
        for name in [builder.REASON] if reason else [builder.LIBRARY, builder.CHECKSUM]:
            build_data["force_include"][str(folder / name)] = f"{NATIVE.removeprefix('src/')}/{name}"
        if reason is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._scratch.cleanup()

    def _say(self, reason: str | None) -> None:
        if reason:
            self.app.display_warning(f"regard is installed without its native code: {reason}")


def load(path: Path) -> ModuleType:
    """A module by its file: to import it by its name would import torch, which is not there yet."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def platform() -> str:
    """The system and processor that the library is for. It knows nothing of Python, so the tag names no Python."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
