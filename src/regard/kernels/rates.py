"""How fast this machine is, as far as the choice between kernels needs it: measured once, or sensible defaults."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import torch

from ..errors import ConfigurationError
from .base import Cost


@dataclass(frozen=True)
class Rates:
    """What a thread does in a second, and what a call costs.

    flops: of matrix products in float32; other dtypes by their share in `DTYPES`. passes: numbers that an element-wise
    operator reads and writes in the cache. moved: bytes to and from main memory, all threads together. call: seconds
    that an operator of torch takes beside its work.
    """

    flops: float = 3.5e10
    passes: float = 6e8
    moved: float = 1.0e10
    call: float = 8e-6

    def seconds(self, cost: Cost, dtype: torch.dtype) -> float:
        """What a cost takes, forward, by all threads."""
        threads = torch.get_num_threads()
        flops = self.flops * DTYPES.get(dtype, 1.0) * threads
        return (
            cost.flops / flops
            + cost.passes / (self.passes * threads)
            + cost.moved / self.moved
            + cost.calls * self.call
        )


DTYPES = {torch.float32: 1.0, torch.float64: 0.5, torch.bfloat16: 1.5, torch.float16: 0.7}
"""Matrix products in a dtype, for each of float32: rough, and alike for all kernels of this machine."""


def cache_file() -> Path:
    """Where measured rates are kept: calibration.json in regard's folder of the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "regard" / "calibration.json"


@cache
def rates() -> Rates:
    """The rates that were measured here, or the defaults where none were, or none that can be read."""
    try:
        return read(cache_file())
    except (OSError, RuntimeError, ConfigurationError):  # no file, no home, or not one of ours: never in the way
        return Rates()


def read(path: Path) -> Rates:
    """The rates of a file.

    Raises:
        ConfigurationError: the file does not hold one number above 0 for each rate.
        OSError: it cannot be read.
    """
    names = [field.name for field in fields(Rates)]
    try:
        held = json.loads(path.read_text("utf-8"))
        measured = {name: float(held[name]) for name in names}
    except (KeyError, TypeError, ValueError):
        measured = {}
    if not measured or not all(0 < number < float("inf") for number in measured.values()):
        raise ConfigurationError(
            f"{path} holds no calibration: it needs a number above 0 for each of {', '.join(names)}; "
            "`regard bench --calibrate` writes it anew"
        )
    return Rates(**measured)


def write(measured: Rates, path: Path) -> None:
    """Keep rates in a file, whole or not at all; from now on they are in use."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(asdict(measured), indent=2) + "\n", "utf-8")
    beside.replace(path)
    rates.cache_clear()
