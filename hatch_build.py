"""While a wheel is built, so is the native code in it. Without a C compiler the wheel holds the reason instead.

An editable installation gets the variants of native code that this processor runs, a wheel all of its family. With
REGARD_PLATFORM, such as macosx_11_0_arm64, the wheel is for that system and processor, which $CC compiles for, and is
not made without native code.

The links of the project are those of the address in REGARD_URL, where it is published; without it there are none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface
from packaging.tags import platform_tags

NATIVE = "src/regard/backends/cpu"
SETTING = "REGARD_PLATFORM"
"""The environment variable that names the system and processor of the wheel as its tag does."""
ADDRESS = "REGARD_URL"
"""The environment variable with the address of the repository, such as https://host/owner/regard."""
PROCESSORS = ("x86_64", "amd64", "aarch64", "arm64")
"""The families of processors that have variants of their own, as the ends of tags name them."""


class NativeCode(BuildHookInterface):
    """Builds into the sources for an editable installation, and for any other beside them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = load(Path(self.root) / NATIVE / "build.py")
        if version == "editable":
            self._say(builder.build())
            return
        self._scratch = tempfile.TemporaryDirectory()
        folder = Path(self._scratch.name)
        tag = os.environ.get(SETTING) or own_platform()
        keep = builder.kept_folder(editable=False)
        reason = builder.build(folder, all_variants=True, keep=keep, machine=processor(tag))
        if reason and os.environ.get(SETTING):
            self._scratch.cleanup()
            raise RuntimeError(f"there is no native code for {SETTING}={tag}: {reason}")
        self._say(reason)
        for name in [builder.REASON] if reason else [builder.LIBRARY, builder.CHECKSUM]:
            build_data["force_include"][str(folder / name)] = f"{NATIVE.removeprefix('src/')}/{name}"
        if reason is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{tag}"
        if os.environ.get(SETTING):
            build_data["sbom_files"].append(str(self._bill_of_materials(folder, tag)))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._scratch.cleanup()

    def _bill_of_materials(self, folder: Path, tag: str) -> Path:
        """The file that says what the wheel is made of."""
        core = self.metadata.core
        bill = load(Path(self.root) / "wheels" / "bill_of_materials.py")
        path = folder / f"{core.name}.cdx.json"
        content = bill.bill_of_materials(core.name, self.metadata.version, tag, core.dependencies)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        return path

    def _say(self, reason: str | None) -> None:
        if reason:
            self.app.display_warning(f"regard is installed without its native code: {reason}")


class ProjectLinks(MetadataHookInterface):
    """Fills in the links of the distribution, which depend on where it is published."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["urls"] = project_links(os.environ.get(ADDRESS, ""))


def project_links(address: str) -> dict[str, str]:
    """The links below the address of the repository; none without one.

    >>> project_links("https://host/owner/regard/")["Changelog"]
    'https://host/owner/regard/blob/main/CHANGELOG.md'
    """
    if not address:
        return {}
    if not address.startswith("https://"):
        raise ValueError(
            f"{ADDRESS} is {address!r}; it needs the address of the repository, as https://host/owner/regard"
        )
    root = address.rstrip("/")
    pages = {"Documentation": "tree/main/docs", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {"Source": root, **{name: f"{root}/{page}" for name, page in pages.items()}}


def load(path: Path) -> ModuleType:
    """A module by its file: to import it by its name would import torch, which is not there yet."""
    specification = importlib.util.spec_from_file_location(path.stem, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def processor(tag: str) -> str:
    """The family of processors that a tag ends with; this one, where the tag ends with none that has variants.

    >>> processor("manylinux_2_17_aarch64")
    'aarch64'
    """
    return next((name for name in PROCESSORS if tag.endswith(f"_{name}")), platform.machine().lower())


def own_platform() -> str:
    """The system and processor that the library is for. It knows nothing of Python, so the tag names no Python."""
    return next(tag for tag in platform_tags() if not tag.startswith(("manylinux", "musllinux")))
