"""The backend in C, for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from . import counted_rows, fire_pairs, library, looked_up_rows, monotonic_rows  # noqa: F401 (they register their rows)
from .additive_loop import AdditiveInC
from .few_queries import FewQueriesInC
from .flash_tiles import FlashInC
from .gathered_lists import GatheredInC
from .linear_recurrence import RecurrencesInC
from .mixed_head_tiles import MixedHeadsInC
from .paged_runs import PagedInC
from .short_rows import ShortInC
from .threshold_tiles import ThresholdsInC
from .timed_flash import TimedFlashInC
from .weight_pass import WeightsInC


class CpuBackend:
    """Native code for CPUs: float32, bfloat16 and float16."""

    name = "cpu"
    nan_safe = False
    runs = staticmethod(library.supports)

    def __init__(self) -> None:
        self.flash, self.few_queries, self.short = FlashInC(), FewQueriesInC(), ShortInC()
        self.gathered, self.additive = GatheredInC(), AdditiveInC()
        self.weights, self.recurrences = WeightsInC(), RecurrencesInC()
        self.timed_flash, self.paged = TimedFlashInC(), PagedInC()
        self.normalizer_tiles = {"threshold": ThresholdsInC(), "mixed_heads": MixedHeadsInC()}

    def arithmetic(self, dtype: torch.dtype) -> str | None:
        """The variant in use, and how it multiplies numbers of 16 bits."""
        if (variant := library.variant_in_use()) is None:
            return None
        told, named = f"native code: {variant}", str(dtype).removeprefix("torch.")
        if library.multiplies_in_pairs(variant, dtype):
            return f"{told}, {named} multiplied in pairs, summed in float32"
        if dtype in (torch.bfloat16, torch.float16):
            return f"{told}, {named} widened to float32 in registers"
        return told

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
