"""Memory for large results: that of a result which is gone, or new memory in huge pages where the system has some free.

The C library maps large blocks afresh for each tensor, and returns those at the end of its heap to the system once they
are free, so that each of their pages has to be found and zeroed at the first write: in pages of 4 KiB that takes a
third of the time of causal linear attention, and of the gradients of a narrow window; where a virtual machine has given
the page back to its host, more than all the rest. So the storages of the last results are kept, and one that no tensor
has any more is the next result of its size. They are storages like any other, and may be resized.

Of new memory, huge pages take less than half of the time. Where the system would first have to move memory to make one,
they would take more, so they are asked for where enough of them are free alone.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

LARGE_BYTES = 2**23
"""Smaller results are mostly in memory that was used before; asking for huge pages takes some 50 microseconds."""

KEPT_BYTES = 2**30
"""The storages that are remembered have so many bytes in all: no more is kept from the rest of the program."""

FREE_SHARE = 2
"""Times as many huge pages as are needed have to be free."""

FREE_BLOCKS = Path("/proc/buddyinfo")
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def new_result(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """An uninitialised large tensor on the CPU with the dtype of another one, in memory as the module says."""
    if type(tensor) in (Tensor, Parameter) and _counts_references():
        return _kept.take(tensor.dtype, shape)
    return in_huge_pages(tensor.new_empty(shape))


def in_huge_pages(made: Tensor) -> Tensor:
    """A new tensor on the CPU, for which the system was asked for huge pages."""
    request_huge_pages(made)
    return made


@dataclass(frozen=True, eq=False, slots=True)
class _Storage:
    """A storage that was a result's: `owner` is a tensor of all of it, which nobody else has."""

    owner: Tensor
    handle: int  # the address of torch's object, for its number of references
    memory: int  # the address of its memory when it was made

    @classmethod
    def allocate(cls, dtype: torch.dtype, count: int) -> _Storage:
        """A new one, for so many numbers."""
        with torch.inference_mode(mode=False):
            owner = torch.empty(count, dtype=dtype, device="cpu")
        request_huge_pages(owner)
        # Not by `untyped_storage`, whose Python object is a reference that stays.
        handle = torch._C._storage_address(owner)  # type: ignore[attr-defined]
        return cls(owner, handle, owner.data_ptr())

    def is_free(self) -> bool:
        """Whether no other tensor, array or storage object has its memory, and nobody has put other memory there."""
        return torch._C._storage_Use_Count(self.handle) == 1 and self.owner.data_ptr() == self.memory

    def tensor(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor of all of it, and no view of the owner."""
        stride = self.owner.view(shape).stride()
        return self.owner.new_empty(0).set_(self.owner, 0, shape, stride)  # type: ignore[arg-type]


class _Kept:
    """The storages of the last large results, those in use included, the latest at the end."""

    def __init__(self) -> None:
        self.storages: list[_Storage] = []
        self.lock = threading.Lock()

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor in a storage of its size that is free, else in a new one."""
        count = math.prod(shape)
        with self.lock:
            fits = (each for each in self.storages if each.owner.dtype == dtype and each.owner.numel() == count)
            found = next((each for each in fits if each.is_free()), None)
            if found is None:
                found = _Storage.allocate(dtype, count)
            else:
                self.storages.remove(found)
            self.storages.append(found)
            while sum(each.owner.nbytes for each in self.storages) > KEPT_BYTES:
                del self.storages[0]
            return found.tensor(shape)

    def forget(self) -> None:
        """Keep none of the storages."""
        with self.lock:
            self.storages.clear()


_kept = _Kept()


def release_memory() -> None:
    """Give memory that is kept for the next large results, at most 1 GiB, back to the system.

    Results that are still in use keep theirs.

    >>> release_memory()
    """
    _kept.forget()


@cache
def _counts_references() -> bool:
    """Whether torch counts the references to a storage as `_Storage` needs it, which no public function promises."""
    try:
        owner = torch.empty(2, device="cpu")
        handle = torch._C._storage_address(owner)  # type: ignore[attr-defined]
        counts = [torch._C._storage_Use_Count(handle)]
        alias = owner.new_empty(0).set_(owner)  # type: ignore[arg-type]
        array = alias.numpy()
        del alias
        counts.append(torch._C._storage_Use_Count(handle))
        del array
        counts.append(torch._C._storage_Use_Count(handle))
        storage = owner.new_empty(0).set_(owner).untyped_storage()  # type: ignore[arg-type]
        counts.append(torch._C._storage_Use_Count(handle))
        return counts == [1, 2, 1, 2] and storage.data_ptr() == owner.data_ptr()
    except (AttributeError, RuntimeError, TypeError):
        return False


def request_huge_pages(tensor: Tensor) -> None:
    """Ask the system for huge pages for a contiguous tensor on the CPU whose memory was not written yet."""
    function, page = _advise(), _page_size()
    if function is None or not page:
        return
    address, size = tensor.data_ptr(), tensor.nbytes
    begin, end = -(-address // page) * page, (address + size) // page * page
    if end > begin and _free_pages(page) >= FREE_SHARE * (end - begin) // page:
        function(begin, end - begin, mmap.MADV_HUGEPAGE)


def _free_pages(page: int) -> int:
    """The huge pages that the system has free: /proc/buddyinfo has the number of free blocks of 1, 2, 4, ... pages."""
    try:
        zones = FREE_BLOCKS.read_text("utf-8").splitlines()
        counts = [[int(count) for count in zone.split("zone")[1].split()[1:]] for zone in zones]
    except (OSError, ValueError, IndexError):
        return 0
    small = mmap.PAGESIZE
    return sum(
        count * (small << order) // page
        for zone in counts
        for order, count in enumerate(zone)
        if small << order >= page
    )


@cache
def _page_size() -> int:
    """Bytes of a huge page; 0 where the system has none."""
    try:
        return int(PAGE_SIZE.read_text("utf-8"))
    except (OSError, ValueError):
        return 0


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """The system's `madvise`; None where it knows no huge pages."""
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return function


def _reset_after_fork() -> None:
    """Start anew in a forked process: a thread that is not there may have held the lock."""
    global _kept
    _kept = _Kept()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


def new_large(tensor: Tensor, *shape: int) -> Tensor:
    """An uninitialised tensor with dtype and device of another one; if it is large, in memory of `large_results`.

    >>> import torch
    >>> new_large(torch.zeros(3), 2, 5).shape
    torch.Size([2, 5])
    """
    if math.prod(shape) * tensor.element_size() < LARGE_BYTES or not tensor.is_cpu:
        return tensor.new_empty(shape)
    return new_result(tensor, shape)


def new_large_like(tensor: Tensor) -> Tensor:
    """`new_large` with the shape of the tensor too: the quickest to make.

    It has the tensor's strides where these leave no gaps and the last is 1; elsewhere it is contiguous.

    >>> import torch
    >>> new_large_like(torch.zeros(2, 3, 5).transpose(0, 1)).stride()
    (5, 15, 1)
    >>> new_large_like(torch.zeros(6).unfold(0, 4, 1)).stride()
    (4, 1)
    """
    if tensor.is_contiguous():
        return new_large(tensor, *tensor.shape)
    like = torch.empty_like(tensor)
    if like.stride(-1) != 1:
        return new_large(tensor, *tensor.shape)
    return like if like.nbytes < LARGE_BYTES or not like.is_cpu else in_huge_pages(like)
