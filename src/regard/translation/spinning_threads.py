"""A warning, once a process, where OpenMP threads spin while other processes occupy the cores."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch

SECONDS_BETWEEN_CHECKS = 5.0
WAITING_SHARE = 0.3
"""Seconds that threads wait for a core, per second, from which on the machine counts as busy with other work."""
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables by which a user chooses whether waiting threads spin or sleep."""

log = logging.getLogger(__name__)

_warned = False


class SpinningCheck:
    """Measures from time to time how long the threads of this process wait for a core.

    At the end of each parallel loop OpenMP threads spin until the last one is done. Where another process occupies its
    core, they spin for as long as the scheduler lets that one wait, and keep the core that it could use: training was
    measured to be 29 times slower than with threads that sleep. Linux alone tells how long threads wait.
    """

    def __init__(self) -> None:
        self._matters = torch.get_num_threads() > 1 and not any(name in os.environ for name in SETTINGS)
        self._begun, self._waited = time.monotonic(), seconds_waited() if self._matters else 0.0

    def check(self) -> None:
        """Warn if threads waited for long since the last check, which was some seconds ago; does nothing before."""
        global _warned
        elapsed = time.monotonic() - self._begun
        if _warned or not self._matters or elapsed < SECONDS_BETWEEN_CHECKS:
            return
        waited = seconds_waited()
        waiting = waited - self._waited
        self._begun, self._waited = time.monotonic(), waited
        if waiting < WAITING_SHARE * elapsed:
            return
        _warned = True
        log.warning(
            "other processes occupy the cores: in the last %.0f s the threads of this one waited %.0f s for a core, "
            "and while one waits, the others spin, which makes it many times slower; set OMP_WAIT_POLICY=PASSIVE in "
            "the environment before Python starts, or OMP_NUM_THREADS=1 (the command `regard` sets the first itself)",
            elapsed,
            waiting,
        )


def seconds_waited() -> float:
    """Seconds that the threads of this process have been ready to run without a core; 0 where that is not known."""
    waited = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        try:
            waited += int(thread.read_text().split()[1])  # running, waiting [ns], time slices
        except (OSError, IndexError, ValueError):  # the thread has ended, or the kernel counts nothing
            continue
    return waited / 1e9
