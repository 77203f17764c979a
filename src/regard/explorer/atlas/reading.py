"""An atlas opened: its sizes checked against each other before anything is read, its arrays mapped into memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from ...errors import AtlasError, require
from .checking import Sizes, check_records, check_rules
from .writing import ENTRY, FORMAT, VERSION

MOST_HEADER = 2**25
"""The most bytes that the part of a file which says what it holds may take."""


class Mapped(Mapping[str, Tensor]):
    """The arrays of a file by name, each made a view of the file when it is first asked for."""

    def __init__(self, file: Any, names: list[str]) -> None:
        self._file, self._names, self._held = file, names, {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._held:
            if name not in self._names:
                raise KeyError(name)
            self._held[name] = self._file.get_tensor(name)
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def opened(path: Path) -> tuple[str, list[dict[str, Any]], Mapping[str, Tensor]]:
    """Title, records and arrays of a file.

    Raises:
        AtlasError: it is missing, truncated, of a newer version, no atlas, or inconsistent.
    """
    require("safetensors.torch", extra="explorer")
    from safetensors import SafetensorError, safe_open

    try:
        _check_header(path)
        file = safe_open(path, framework="pt")
        names = sorted(file.keys())
        metadata = file.metadata() or {}
        sizes: Sizes = {name: _size(file, name) for name in names}
    except OSError as error:
        raise AtlasError(f"{path} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, UnicodeDecodeError) as error:
        raise AtlasError(
            f"{path} is not a whole file of the safetensors format ({str(error)[:200]}): truncated, or something else"
        ) from None
    head = _head(path, metadata)
    arrays = Mapped(file, names)
    try:
        check_records(head["records"], sizes)
        check_rules(head["records"], arrays)
    except AtlasError as error:
        raise AtlasError(f"{path} is inconsistent: {error}") from None
    return head["title"], head["records"], arrays


def _size(file: Any, name: str) -> tuple[str, tuple[int, ...]]:
    part = file.get_slice(name)
    return part.get_dtype(), tuple(part.get_shape())


def _check_header(path: Path) -> None:
    """That the file's first part is no longer than it may be: it is parsed as a whole."""
    with path.open("rb") as file:
        size, first = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length + 8 > size:
        raise AtlasError(
            f"{path} is no atlas, or truncated: it has {size:,} bytes, and its header alone says {length:,}"
        )
    if length > MOST_HEADER:
        raise AtlasError(f"{path} has a header of {length:,} bytes; an atlas has at most {MOST_HEADER:,}")


def _head(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get(ENTRY)
    if text is None:
        raise AtlasError(f"{path} is a safetensors file, but no atlas: it has no entry {ENTRY!r}")
    try:
        head = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise AtlasError(f"{path} is inconsistent: its entry {ENTRY!r} is no JSON ({str(error)[:100]})") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise AtlasError(f"{path} is a safetensors file, but no atlas: its entry {ENTRY!r} is of another format")
    version = head.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise AtlasError(f"{path} is inconsistent: its version is {str(version)[:80]!r}, and needs to be {VERSION}")
    if version > VERSION:
        raise AtlasError(f"{path} is an atlas of version {version}; this regard reads {VERSION}: install a newer one")
    if not isinstance(head.get("title"), str) or not isinstance(head.get("records"), list):
        raise AtlasError(f"{path} is inconsistent: it needs a title and a list of records")
    return head


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
