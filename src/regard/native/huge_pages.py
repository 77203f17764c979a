"""Large results in huge pages, where the system has some free.

The C library maps large blocks afresh for each tensor, and returns those at the end of its heap to the system once they
are free, so that each of their pages has to be found and zeroed at the first write: in pages of 4 KiB that takes a
third of the time of causal linear attention, and of the gradients of a narrow window. Huge pages take less than half of
it. Where the system would first have to move memory to make one, they would take more, so they are asked for where
enough of them are free alone.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from torch import Tensor

FREE_SHARE = 2
"""Times as many huge pages as are needed have to be free."""

FREE_BLOCKS = Path("/proc/buddyinfo")
PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


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
