import sys
from pathlib import Path

import pytest

from regard.kernels.planning.rates import ZEN_4, ZEN_5

sys.path.insert(0, str(Path(__file__).parent))  # for device_tensors

PROCESSORS = [
    *(("AVX512", "avx512"), ("AVX512", "avx512bf16"), ("AVX2", "avx2"), ("ARM", "neon"), ("ARM", "neonbf16")),
    *((ZEN_4, "avx512"), (ZEN_4, "avx512bf16"), (ZEN_4, "avx2"), (ZEN_5, "avx512"), (ZEN_5, "avx512bf16")),
]
"""Processors with prices of their own, and the variants with vector instructions that may be in use there."""


@pytest.fixture(params=PROCESSORS, ids=" ".join)
def any_processor(request, priced_as) -> None:
    """Kernels are chosen as on each processor of the tables with vector instructions, one after the other."""
    priced_as(*request.param)
