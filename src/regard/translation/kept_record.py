"""A few numbers that are kept beside the weights of a model, as a file of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.errors import CheckpointError
from regard.utils.atomic_files import atomic_write

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record")


def save_record(record: DataclassInstance, path: Path) -> None:
    """Write the fields of a record, replaced atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


def load_record(path: Path, make: Callable[[dict[str, Any]], Record], mend: str) -> Record | None:
    """What `make` makes of the fields in a file, None where there is no file.

    Raises:
        CheckpointError: the file was damaged; the message ends with the mend.
    """
    if not path.exists():
        return None
    try:
        return make(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {mend}") from None
