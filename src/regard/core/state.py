"""The state of what a mask or a bias reads: tensors and other objects, as they were, and whether they still are so."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

VALUES = (int, float, complex, str, bytes, range, slice, type(None), torch.dtype, torch.device, np.generic, enum.Enum)
"""The types whose objects never change, and are compared by equality."""
MISSING = object()
"""What an empty place holds."""


class CountedTensor(NamedTuple):
    """A tensor, the number of writes that torch has counted, and whether its memory is its own.

    Memory that processes share, as that of a batch from the workers of a DataLoader, never is.
    """

    tensor: Tensor
    version: int
    storage: torch.UntypedStorage
    own: bool


@dataclass(slots=True)  # not frozen: masks that are made anew for each call would feel what that takes
class State:
    """The places that were read, with what they held, and tensors with their versions, by which torch counts writes.

    A tensor or another object is compared by identity, a number or a text by equality.

    tensors: by their versions. cells: of closures. entries: a namespace or dictionary, the key, and what it held.
    contents: of a list, a set or slots, by a function that lists them.

    >>> limit, numbers = torch.zeros(2), {"n": 3}
    >>> state = State([counted(limit)], entries=[(numbers, "n", 3)])
    >>> state.is_current()
    True
    >>> numbers["n"] = 4
    >>> state.is_current()
    False
    """

    tensors: list[CountedTensor] = field(default_factory=list)
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    entries: list[tuple[Mapping, Any, Any]] = field(default_factory=list)
    contents: list[tuple[Callable[[Any], tuple], Any, tuple]] = field(default_factory=list)

    def __len__(self) -> int:
        """The number of places that are compared."""
        listed = sum(len(seen) for *_, seen in self.contents)
        return len(self.tensors) + len(self.cells) + len(self.entries) + listed

    def is_current(self) -> bool:
        """Whether every place holds what it held."""
        for tensor, version, storage, own in self.tensors:
            if tensor._version != version or storage.resizable() is not own:
                return False
        for cell, seen in self.cells:
            if (now := cell_content(cell)) is not seen and not _equal(now, seen):
                return False
        for mapping, key, seen in self.entries:
            if (now := mapping.get(key, MISSING)) is not seen and not _equal(now, seen):
                return False
        contents = self.contents
        return not contents or all(_same(listed(container), seen) for listed, container, seen in contents)

    def equals(self, other: State) -> bool:
        """Whether both have the same places, which held the same."""
        return _same(self._parts(), other._parts())

    def tensor_bytes(self) -> int:
        """The memory of all tensors."""
        return sum(each.tensor.nbytes for each in self.tensors)

    def _parts(self) -> tuple:
        listed = (each for _, container, seen in self.contents for each in (container, *seen))
        return (*chain(*(each[:2] for each in self.tensors)), *chain(*self.cells), *chain(*self.entries), *listed)


def is_constant(value: Any) -> bool:
    """Whether a value consists of the library's own dataclasses of numbers alone, so that it never changes.

    >>> is_constant((1, None, 0.5)), is_constant((1, torch.zeros(2))), is_constant(lambda: 1)
    (True, False, False)
    """
    if type(value) is tuple:
        return all(map(is_constant, value))
    names = _constant_fields(type(value))
    if names is None:
        return False
    for name in names:
        part = getattr(value, name)
        if part is not None and not is_constant(part):
            return False
    return True


@functools.cache
def _constant_fields(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass of the library, none of a number; None for any type whose objects may change."""
    if issubclass(kind, VALUES):
        return ()
    if kind.__module__.split(".")[0] != "regard" or not is_dataclass(kind):
        return None
    return tuple(each.name for each in fields(kind) if each.init)


def state_of_tensors(value: Any) -> State | None:
    """The state of a value that consists of the library's own dataclasses of numbers and tensors; None of any other.

    >>> len(state_of_tensors((1, torch.zeros(2))))
    1
    """
    tensors: list[CountedTensor] = []
    return State(tensors) if _add_tensors(value, tensors) else None


def _add_tensors(value: Any, tensors: list[CountedTensor]) -> bool:
    if isinstance(value, Tensor):
        if (found := counted(value)) is not None:
            tensors.append(found)
        return found is not None
    if type(value) is tuple:
        return all(_add_tensors(part, tensors) for part in value)
    names = _constant_fields(type(value))
    return names is not None and all(_add_tensors(getattr(value, name), tensors) for name in names)


def counted(tensor: Tensor) -> CountedTensor | None:
    """A tensor as it is, where torch counts what is written to it; None where it does not.

    That is a tensor of inference mode, and one of whose memory NumPy, a file or another library has a view, too.

    >>> counted(torch.zeros(2)) is None, counted(torch.from_numpy(np.zeros(2))) is None
    (False, True)
    """
    if tensor.is_inference():
        return None
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # inside a transform of torch.func
        return None
    own = storage.resizable()  # `Tensor.numpy` and `torch.from_numpy` make it that it is not
    return CountedTensor(tensor, tensor._version, storage, own) if own or storage.is_shared() else None


def cell_content(cell: types.CellType) -> Any:
    """What a closure's cell holds; MISSING before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _equal(now: Any, seen: Any) -> bool:
    return type(now) is type(seen) and isinstance(now, VALUES) and bool(now == seen)


def _same(now: tuple, seen: tuple) -> bool:
    return len(now) == len(seen) and all(a is b or _equal(a, b) for a, b in zip(now, seen, strict=True))
