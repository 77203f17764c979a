"""Every test starts from the same seeds, on two threads; memory shows when it is read before it is written."""

import functools
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

# Read once, when torch is loaded: threads that wait awake for each other make training many times slower where
# something else keeps the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import regard

PACKAGE = str(Path(regard.__file__).parent) + os.sep
THREADS = 2


def pytest_configure() -> None:
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Also for the processes that tests start; many threads on small tensors are slower than few.
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same allocation, filled with NaN where regard itself asks for it and the dtype has a NaN."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        asked_by_regard = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
        if asked_by_regard and (tensor.is_floating_point() or tensor.is_complex()):
            with torch.no_grad():
                tensor.fill_(math.nan)
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
