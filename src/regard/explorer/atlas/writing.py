"""An atlas written: one file in the safetensors format, replaced in one step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import AtlasError, CheckpointError, require
from ...files import atomic_write

FORMAT = "regard-atlas"
VERSION = 2
"""Of the layout; raised when an older regard could not read the file. Files of version 1 are read too."""
ENTRY = "atlas"
"""The entry of the file's metadata that holds the JSON text."""


def save(path: Path, title: str, records: Sequence[Mapping[str, Any]], arrays: Mapping[str, Tensor]) -> None:
    """Write all of an atlas.

    Raises:
        AtlasError: it cannot be written.
    """
    safetensors = require("safetensors.torch", extra="explorer")
    head = {"format": FORMAT, "version": VERSION, "title": title, "records": list(records)}
    text = json.dumps(head, allow_nan=False, ensure_ascii=False)
    held = {name: arrays[name] for name in arrays}
    try:
        with atomic_write(path) as partial:
            safetensors.save_file(_apart(held), partial, metadata={ENTRY: text})
    except CheckpointError as error:
        raise AtlasError(str(error)) from error


def _apart(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same arrays, no two of which share memory, as safetensors asks for."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, array in arrays.items():
        memory = array.untyped_storage().data_ptr()
        apart[name] = array.clone() if memory in taken else array
        taken.add(memory)
    return apart
