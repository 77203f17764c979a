"""Atlas files: JSON and named arrays in the safetensors format, with a checksum of each, memory-mapped when opened."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ...errors import AtlasError, CheckpointError
from ...utils.safetensors_files import TensorFile, storable, write_tensors
from .record_schema import Sizes, check_records, check_rules

FORMAT = "regard-atlas"
VERSION = 1
"""Of the layout; raised when an older regard could not read the file."""
ENTRY = "atlas"
"""The entry of the file's metadata that holds the JSON text."""
CHECKSUM = "crc32"
"""The entry of the file's metadata that holds the checksum of the JSON text; arrays have theirs in the text."""
EXTRA = "explorer"
"""The extra of regard that installs safetensors."""
LONGEST_HEADER = 2**25
"""The most bytes that the header of an atlas may have; it is parsed as a whole."""
CHECKED_AT_ONCE = 2**25
"""Files of at most this many bytes are verified when they are opened, in some 35 ms; larger ones array by array."""


def save_atlas(path: Path, title: str, records: Sequence[Mapping[str, Any]], arrays: Mapping[str, Tensor]) -> None:
    """Write title, records and arrays to one file, replacing it in one step.

    Raises:
        AtlasError: it cannot be written, or an array comes from a file that is damaged.
    """
    tensors = storable({name: arrays[name] for name in arrays})
    head = {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "records": list(records),
        "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    text = json.dumps(head, allow_nan=False, ensure_ascii=False)
    try:
        write_tensors(path, tensors, {ENTRY: text, CHECKSUM: str(zlib.crc32(_utf8(text)))}, EXTRA)
    except CheckpointError as error:
        raise AtlasError(str(error)) from error


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a contiguous tensor.

    >>> checksum(torch.tensor([49, 50, 51], dtype=torch.uint8)) == zlib.crc32(b"123")
    True
    """
    if not tensor.numel():
        return 0
    raw: np.ndarray[Any, Any] = tensor.reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(raw.data)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class MappedArrays(Mapping[str, Tensor]):
    """The arrays of an open file by name: views of the mapped file, each verified when it is first read.

    Raises:
        AtlasError: on reading an array whose bytes do not have the checksum that was stored with them.
    """

    def __init__(self, path: Path, file: TensorFile, checksums: Mapping[str, int]) -> None:
        self._path, self._file, self._checksums = path, file, checksums
        self._verified: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._verified:
            tensor = self.unverified(name)
            if checksum(tensor) != self._checksums[name]:
                raise AtlasError(damaged(self._path, f"the array {name[:80]!r}"))
            self._verified[name] = tensor
        return self._verified[name]

    def unverified(self, name: str) -> Tensor:
        """An array whose bytes are not read before its values are."""
        if name not in self._checksums:
            raise KeyError(name)
        return self._file.mapped(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checksums)

    def __len__(self) -> int:
        return len(self._checksums)


class UnverifiedArrays(Mapping[str, Tensor]):
    """The same arrays without verification, for checks that must not read a large file as a whole."""

    def __init__(self, arrays: MappedArrays) -> None:
        self._arrays = arrays

    def __getitem__(self, name: str) -> Tensor:
        return self._arrays.unverified(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def damaged(path: Path, part: str) -> str:
    """The error message for bytes of a file whose checksum differs from the stored one."""
    return (
        f"{path} is damaged: {part} does not have the checksum that was stored with it, so that some of its bytes have "
        "changed since it was written; copy the file again, or record the model again"
    )


def open_atlas(path: Path) -> tuple[str, list[dict[str, Any]], Mapping[str, Tensor]]:
    """Title, records and memory-mapped arrays of a file.

    Raises:
        AtlasError: it is missing, truncated, of a newer version, no atlas, damaged or inconsistent.
    """
    try:
        file = TensorFile(path, extra=EXTRA, kind="an atlas", longest_header=LONGEST_HEADER)
    except CheckpointError as error:
        raise AtlasError(str(error)) from None
    sizes: Sizes = {name: (file.dtypes[name], file.shapes[name]) for name in sorted(file.shapes)}
    head = _parse_head(path, file.metadata)
    _check_checksums(path, head, sizes)
    arrays = MappedArrays(path, file, head["checksums"])
    try:
        check_records(head["records"], sizes)
    except AtlasError as error:
        raise AtlasError(f"{path} is inconsistent: {error}") from None
    if file.nbytes <= CHECKED_AT_ONCE:
        for name in arrays:
            arrays[name]
    try:
        check_rules(head["records"], UnverifiedArrays(arrays))
    except AtlasError as error:
        raise AtlasError(f"{path} is inconsistent: {error}") from None
    return head["title"], head["records"], arrays


def _parse_head(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON text of a file: format, version, title, records and checksums."""
    text = metadata.get(ENTRY)
    if text is None:
        raise AtlasError(f"{path} is a safetensors file, but no atlas: it has no entry {ENTRY!r}")
    try:
        head = json.loads(text, parse_constant=_reject_constant)
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
    if metadata.get(CHECKSUM) != str(zlib.crc32(_utf8(text))):
        raise AtlasError(damaged(path, f"its entry {ENTRY!r}"))
    return head


def _check_checksums(path: Path, head: Mapping[str, Any], sizes: Sizes) -> None:
    found = head.get("checksums")
    if not isinstance(found, dict) or set(found) != set(sizes) or not all(type(sum_) is int for sum_ in found.values()):
        raise AtlasError(f"{path} is inconsistent: it needs a checksum, a whole number, of each of its arrays")


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")
