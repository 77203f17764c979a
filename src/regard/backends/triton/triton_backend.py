"""The backend in Triton, for CUDA devices."""

from __future__ import annotations

from torch import Tensor, dtype

from . import jit_runtime


class TritonBackend:
    """Kernels in Triton: float32, bfloat16 and float16. What needs Triton is imported at the first use."""

    name = "triton"
    nan_safe = True
    runs = staticmethod(jit_runtime.runs)
    flash = None
    few_queries = None
    short = None
    additive = None
    weights = None
    recurrences = None
    timed_flash = None

    def arithmetic(self, dtype: dtype) -> None:
        """Nothing to tell."""

    def why_not(self, value: Tensor) -> list[str]:
        """Other dtypes and devices, no Triton, and cards that are too old for it."""
        return jit_runtime.why_not(value)


TRITON = TritonBackend()
