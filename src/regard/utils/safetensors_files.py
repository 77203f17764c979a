"""safetensors files: written atomically, opened with their header checked, and compared with a model's state.

Every caller names the extra of regard that installs safetensors, which is imported when a file is written or opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, require
from .atomic_files import atomic_write

MAX_NAMED_TENSORS = 3
"""The most tensors that an error message names for each difference."""
LONGEST_HEADER = 100_000_000
"""The most bytes that safetensors accepts as a header, which is parsed as a whole."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], extra: str) -> None:
    """Write tensors and a mapping of strings to one safetensors file, replacing it atomically.

    Raises:
        CheckpointError: the file cannot be written, or a tensor is not dense.
        MissingExtra: safetensors is not installed.
    """
    torch_io = require("safetensors.torch", extra=extra)
    plain = storable(tensors)
    with atomic_write(path) as partial:
        torch_io.save_file(plain, partial, metadata=dict(metadata))


def storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as safetensors requires them: on the CPU, contiguous, no two in the same memory.

    Raises:
        CheckpointError: a tensor that is not dense.

    >>> table = torch.arange(6).view(2, 3)
    >>> plain = storable({"table": table, "transposed": table.T})
    >>> plain["table"] is table, plain["transposed"].is_contiguous()
    (False, True)
    """
    plain: dict[str, Tensor] = {}
    used: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{name} is a tensor of layout {tensor.layout}; checkpoints need dense tensors")
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage().data_ptr()
        plain[name] = dense.clone() if memory in used else dense
        used.add(plain[name].untyped_storage().data_ptr())
    return plain


class TensorFile:
    """An open safetensors file: metadata, shapes and dtypes at once, each tensor when it is read.

    Raises:
        CheckpointError: the file is missing, truncated or of another format, or has a header longer than files of its
            `kind` have, `longest_header` bytes.
        MissingExtra: safetensors is not installed.
    """

    def __init__(
        self, path: Path, *, extra: str, kind: str = "a safetensors file", longest_header: int = LONGEST_HEADER
    ) -> None:
        safetensors = require("safetensors", extra=extra)
        require("safetensors.torch", extra=extra)
        self.path = path
        try:
            self.nbytes = _check_header(path, kind, longest_header)
            self._file = safetensors.safe_open(path, framework="pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 (not a dict)
            self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            self.dtypes: dict[str, str] = {name: part.get_dtype() for name, part in slices.items()}
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
        except (safetensors.SafetensorError, UnicodeDecodeError) as error:
            raise CheckpointError(_not_whole(path, str(error)[:200])) from None

    def mapped(self, name: str) -> Tensor:
        """A tensor as a view of the file, which is memory-mapped: no bytes are read before its values are."""
        return self._file.get_tensor(name)

    def read(self, name: str) -> Tensor:
        """A tensor in its own memory, which does not change, or vanish, with the file."""
        return self.mapped(name).clone()


def _check_header(path: Path, kind: str, longest: int) -> int:
    """Check that the header fits into the file and the limit, and return the size of the file in bytes."""
    with path.open("rb") as file:
        size, first = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length + 8 > size:
        raise CheckpointError(_not_whole(path, f"it has {size:,} bytes, and its header alone says {length:,}"))
    if length > longest:
        raise CheckpointError(f"{path} has a header of {length:,} bytes; {kind} has at most {longest:,}")
    return size


def _not_whole(path: Path, reason: str) -> str:
    return f"{path} is not a whole safetensors file ({reason}): truncated, or something else"


def state_differences(found: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]) -> str:
    """Describe how the tensors of a file differ from a model's, given the shapes of both: counts and the first names.

    >>> state_differences({"a": (2,), "c": (1,)}, {"a": (3,), "b": (1,)})
    '1 missing (b); 1 extra (c); 1 of another shape (a: the file has [2], the model needs [3])'
    """
    missing = [name for name in needed if name not in found]
    extra = [name for name in found if name not in needed]
    reshaped = [
        f"{name}: the file has {list(found[name])}, the model needs {list(needed[name])}"
        for name in needed
        if name in found and tuple(found[name]) != tuple(needed[name])
    ]
    kinds = {"missing": missing, "extra": extra, "of another shape": reshaped}
    return "; ".join(f"{len(names)} {kind} ({_first_few(names)})" for kind, names in kinds.items() if names)


def _first_few(names: list[str]) -> str:
    return ", ".join(names[:MAX_NAMED_TENSORS]) + (", ..." if len(names) > MAX_NAMED_TENSORS else "")
