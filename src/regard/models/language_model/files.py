"""Safetensors files, read a tensor at a time, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError, require
from ...files import atomic_write

EXTRA = "translation"
"""Which extra of regard brings safetensors."""
NAMED_AT_MOST = 3


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: the file is missing, or holds something else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): truncated, or something else") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; it needs an object, {{...}}")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object, in one step."""
    with atomic_write(path) as partial:
        partial.write_text(json.dumps(value, indent=1), "utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file, in one step."""
    torch_io = require("safetensors.torch", extra=EXTRA)
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as partial:
        torch_io.save_file(plain, partial, metadata={"format": "pt"})


class Tensors:
    """The tensors of one safetensors file: shapes without reading them, and each by its name.

    Raises:
        CheckpointError: the file is missing, truncated or something else.
        MissingExtra: safetensors is not installed.
    """

    def __init__(self, path: Path) -> None:
        safetensors = require("safetensors", extra=EXTRA)
        self.path = path
        try:
            self.file = safetensors.safe_open(path, framework="pt")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file ({error}): load it again") from None
        self.shapes = {name: tuple(self.file.get_slice(name).get_shape()) for name in self.file.keys()}  # noqa: SIM118

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own: the file may change or vanish."""
        return self.file.get_tensor(name).clone()


def check_same(what: str, found: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> None:
    """The same names and shapes.

    Raises:
        CheckpointError: names that are missing, extra or of another shape, counted.
    """
    missing = [name for name in needed if name not in found]
    extra = [name for name in found if name not in needed]
    reshaped = [
        f"{name}: {list(found[name])} where {list(needed[name])} is needed"
        for name in needed
        if name in found and tuple(found[name]) != tuple(needed[name])
    ]
    kinds = {"missing": missing, "extra": extra, "of another shape": reshaped}
    differences = [f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names]
    if differences:
        raise CheckpointError(f"{what}: of the {len(needed)} tensors that the model needs {'; '.join(differences)}")


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")
