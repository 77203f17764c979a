"""The backend in Triton, for CUDA devices."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor, dtype

from ...core.problem import Problem
from ...lenses.weights import register_writer
from ..base import WeightPass
from . import jit_runtime
from .additive_attention import AdditiveInTriton
from .fused_attention import FlashInTriton
from .gathered_launches import GatheredInTriton
from .paged_tiles import PagedInTriton
from .split_keys import FewQueriesInTriton
from .threshold_attention import ThresholdsInTriton
from .timed_launches import TimedFlashInTriton

if TYPE_CHECKING:
    from .recurrence_launch import RecurrencesInTriton


class TritonBackend:
    """Kernels in Triton: float32, bfloat16 and float16. What needs Triton is imported at the first use."""

    name = "triton"
    nan_safe = True
    runs = staticmethod(jit_runtime.runs)
    short = None

    def __init__(self) -> None:
        # Kernels look at these for tensors of any device, while torch.compile traces them too: they are attributes.
        self.flash, self.few_queries, self.additive = FlashInTriton(), FewQueriesInTriton(), AdditiveInTriton()
        self.gathered, self.paged, self.timed_flash = GatheredInTriton(), PagedInTriton(), TimedFlashInTriton()
        self.normalizer_tiles = {"threshold": ThresholdsInTriton(self.flash)}

    @property
    @cache  # noqa: B019  # there is one backend, for as long as the process lives
    def recurrences(self) -> RecurrencesInTriton | None:
        """The linear recurrence in chunks of tokens."""
        if jit_runtime.missing():
            return None
        from .recurrence_launch import RecurrencesInTriton

        return RecurrencesInTriton()

    @property
    @cache  # noqa: B019
    def weights(self) -> WeightPass | None:
        """The pass over weights for lenses; None without Triton."""
        if jit_runtime.missing() is not None:
            return None
        from .lens_pass_launch import WeightsInTriton

        return WeightsInTriton()

    def arithmetic(self, dtype: dtype) -> None:
        """Nothing to tell."""

    def why_not(self, value: Tensor) -> list[str]:
        """Other dtypes and devices, no Triton, and cards that are too old for it."""
        return jit_runtime.why_not(value)


TRITON = TritonBackend()


def _write_rows(problem: Problem, lse: Tensor, rows: slice, columns: slice, into: Tensor) -> bool:
    """Write the weights of some rows and columns; False if there is no code in Triton for them."""
    if not TRITON.runs(problem.value):
        return False
    from .lens_pass_launch import write_rows

    return write_rows(problem, lse, rows, columns, into)


register_writer(_write_rows)
