"""Read Marian's binary file (.bin): tensors by name, in single precision or as whole numbers with one scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import CheckpointError

VERSION = 1
_ENCRYPTED = 2
_PLAIN = {
    0x101: np.dtype("i1"),
    0x402: np.dtype("<f2"),
    0x404: np.dtype("<f4"),
    0x408: np.dtype("<f8"),
}
"""Numbers as they are, by the number of their type."""
_ROUNDED = {0x4101: np.dtype("i1"), 0x10001: np.dtype("i1"), 0x4102: np.dtype("<i2"), 0x10002: np.dtype("<i2")}
"""intgemm8 and intgemm16: numbers that were multiplied by a scale and rounded; Bergamot's and Marian's own number."""
_TILED = {
    0x802: "packed16",
    0x1801: "packed8avx2",
    0x2801: "packed8avx512",
    0x18001: "intgemm8ssse3",
    0x11001: "intgemm8avx2",
    0x12001: "intgemm8avx512",
    0x13001: "intgemm8avx512vnni",
    0x14002: "intgemm16sse2",
    0x11002: "intgemm16avx2",
    0x12002: "intgemm16avx512",
}
"""Numbers in the order in which one kind of processor reads them."""


def read_binary(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a binary file of Marian by name; rounded ones are widened to float32.

    The file is little-endian: uint64 version and count; of each tensor four uint64, the bytes of its name, its type,
    its dims, the bytes of its data; all names, each with a zero byte; all shapes, int32; uint64 padding, and that many
    bytes; all data, which may have padding of its own. Of rounded tensors a float32 follows the numbers, the scale s
    that they were multiplied by: w = q / s. Matrices of these have their columns one after the other; tables of
    embeddings, with "Wemb" in their name, their rows, as unrounded tensors have.

    Raises:
        CheckpointError: the file cannot be read, is of another version, encrypted, truncated or damaged, or has a
            tensor of another type, as those are that one kind of processor reads alone.

    Source: the format that Marian writes (`marian-conv`), and Bergamot's models have.
    """
    try:
        file = _Bytes(path, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    version, count = (int(number) for number in file.take("<u8", 2))
    if version == _ENCRYPTED:
        raise CheckpointError(f"{path} is encrypted: convert the model that it was made of with marian-conv")
    if version != VERSION:
        raise CheckpointError(
            f"{path} is no binary file of Marian that is read here: it begins with the version {version}, and needs "
            f"{VERSION}"
        )
    headers = [[int(number) for number in row] for row in file.take("<u8", 4 * count).reshape(count, 4)]
    names = [file.take("u1", size).tobytes().split(b"\0")[0].decode("utf-8", "replace") for size, *_ in headers]
    shapes = [tuple(int(dim) for dim in file.take("<i4", dims)) for _, _, dims, _ in headers]
    file.take("u1", int(file.take("<u8", 1)[0]))
    tensors = {}
    for name, shape, (_, kind, _, size) in zip(names, shapes, headers, strict=True):
        tensors[name] = _Stored(path, name, kind, shape, file.take("u1", size)).tensor()
    return tensors


@dataclass
class _Bytes:
    """The bytes of a file, taken one part after the other."""

    path: Path
    content: bytes
    at: int = 0

    def take(self, dtype: str, count: int) -> np.ndarray:
        """The next `count` numbers.

        Raises:
            CheckpointError: the file has fewer.
        """
        end = self.at + count * np.dtype(dtype).itemsize
        if end > len(self.content):
            raise CheckpointError(
                f"{self.path} is truncated or no binary file of Marian: it has {len(self.content):,} bytes, and its "
                f"header tells of at least {end:,}"
            )
        taken = np.frombuffer(self.content, dtype, count, self.at)
        self.at = end
        return taken


@dataclass(frozen=True)
class _Stored:
    """A tensor as it is stored: the number of its type, its shape, and its bytes."""

    path: Path
    name: str
    kind: int
    shape: tuple[int, ...]
    content: np.ndarray

    def tensor(self) -> np.ndarray:
        """The numbers, those of a rounded tensor over their scale.

        Raises:
            CheckpointError: another type, fewer bytes than the shape has numbers, or a scale that is none.
        """
        dtype = (_PLAIN | _ROUNDED).get(self.kind)
        if dtype is None:
            raise self._unread()
        numbers = math.prod(self.shape)
        needed = numbers * dtype.itemsize + 4 * (self.kind in _ROUNDED)
        if min(self.shape, default=1) < 1 or needed > self.content.nbytes:
            raise CheckpointError(
                f"{self.name} in {self.path} has the shape {self.shape} and {self.content.nbytes:,} bytes of data: the "
                "file is damaged"
            )
        values = np.frombuffer(self.content, dtype, numbers)
        if self.kind in _PLAIN:
            return values.reshape(self.shape)
        scale = np.frombuffer(self.content, "<f4", 1, numbers * dtype.itemsize)[0]
        if not (np.isfinite(scale) and scale > 0):
            raise CheckpointError(f"{self.name} in {self.path} has the scale {scale}: the file is damaged")
        widened = values.astype(np.float32) / scale
        if "Wemb" in self.name or len(self.shape) != 2:
            return widened.reshape(self.shape)
        return widened.reshape(self.shape[::-1]).T

    def _unread(self) -> CheckpointError:
        where = f"{self.name} in {self.path} is stored as"
        if self.kind in _TILED:
            return CheckpointError(
                f"{where} {_TILED[self.kind]}, in an order that one kind of processor reads: convert the model's .npz "
                "with marian-conv --gemm-type intgemm8, or float32"
            )
        return CheckpointError(f"{where} type {self.kind:#x}; read are float32, float16, intgemm8 and intgemm16")
