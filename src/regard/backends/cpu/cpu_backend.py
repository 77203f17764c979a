"""The backend in C, for CPUs."""

from __future__ import annotations

from torch import Tensor

from . import library
from .additive_loop import AdditiveInC
from .few_queries import FewQueriesInC
from .flash_tiles import FlashInC
from .linear_recurrence import RecurrencesInC
from .short_rows import ShortInC
from .weight_pass import WeightsInC


class CpuBackend:
    """Native code for CPUs: float32, bfloat16 and float16."""

    name = "cpu"
    runs = staticmethod(library.supports)

    def __init__(self) -> None:
        self.flash, self.few_queries, self.short = FlashInC(), FewQueriesInC(), ShortInC()
        self.additive, self.weights, self.recurrences = AdditiveInC(), WeightsInC(), RecurrencesInC()

    def why_not(self, value: Tensor) -> list[str]:
        """Other dtypes and devices, and a library that was not built."""
        reasons = []
        if value.dtype not in library.DTYPES:
            reasons.append(f"its code reads {library.DTYPE_NAMES}; this is {str(value.dtype).removeprefix('torch.')}")
        if not value.is_cpu:
            reasons.append(f"its code runs on the CPU; this is on {value.device}")
        if reason := library.why_not():
            reasons.append(f"there is no native code: {reason}")
        return reasons


CPU = CpuBackend()
