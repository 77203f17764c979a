"""Tests of kernels in Triton, which its interpreter runs on CPU tensors: `make test-triton`, a part of `make test`.

Whether kernels are interpreted is read when Triton is imported, so that a process of their own runs these tests.
"""

import sys
from pathlib import Path

import pytest

from regard.backends.triton import jit_runtime

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not jit_runtime.INTERPRETED:
        for item in items:
            if "interpreted" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs Triton's interpreter: make test-triton"))
