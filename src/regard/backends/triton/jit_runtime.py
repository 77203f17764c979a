"""Whether Triton runs here: on a CUDA device, or on the CPU by Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the kernels read."""
LEAST_CAPABILITY = 8, 0
"""The oldest compute capability that Triton compiles for."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on CPU tensors, one program after another, in NumPy: for tests. Triton reads it when imported."""
DEVICE = "cpu" if INTERPRETED else "cuda"


class Chip(NamedTuple):
    """What sizes of tiles and numbers of programs follow from: multiprocessors, and the most shared memory of one."""

    processors: int
    shared_bytes: int


INTERPRETED_CHIP = Chip(132, 227 * 1024)
"""An H100: the sizes that kernels have there are those that the interpreter runs."""


@cache
def chip(device: torch.device) -> Chip:
    """The chip of a device."""
    if DEVICE != "cuda":
        return INTERPRETED_CHIP
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on so many programs; constants: by name, what it is compiled for."""
    kernel[programs](*arguments, **constants)


@cache
def missing() -> str | None:
    """Why there is no Triton; None if it can be imported."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install 'regard[triton]' brings it"
    return None


@cache
def too_old(device: torch.device) -> str | None:
    """Why a CUDA device is too old for Triton; None if it is not."""
    if torch.version.cuda is None:
        return "this build of torch is not for CUDA"
    if not torch.cuda.is_available():
        return "torch finds no NVIDIA card with a driver"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, LEAST_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; Triton needs {needed}"
    return None


def why_not(value: Tensor) -> list[str]:
    """Reasons why kernels in Triton do not read this tensor, by its device and dtype."""
    reasons = []
    if value.dtype not in DTYPES:
        named = str(value.dtype).removeprefix("torch.")
        reasons.append(f"its code in Triton reads float32, bfloat16 or float16; this is {named}")
    if value.device.type != DEVICE:
        reasons.append(
            f"its code in Triton runs on {'CUDA devices' if DEVICE == 'cuda' else 'the CPU, interpreted'}; "
            f"this is on {value.device}"
        )
    elif reason := missing() or (too_old(value.device) if DEVICE == "cuda" else None):
        reasons.append(f"there is no code in Triton: {reason}")
    return reasons


def runs(*tensors: Tensor) -> bool:
    """Whether kernels in Triton read all of these."""
    return all(tensor.device.type == DEVICE and tensor.dtype in DTYPES for tensor in tensors) and _usable(
        tensors[0].device
    )


@cache
def _usable(device: torch.device) -> bool:
    return missing() is None and (DEVICE != "cuda" or too_old(device) is None)


def float32_products() -> str:
    """The precision of products of float32 on tensor cores, as `tl.dot` names it: TF32 where torch allows it.

    Three products of TF32 have the accuracy of float32, some 2⁻²², at tens of times the rate of float32 itself.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def exact_products() -> str:
    """The precision of products that are rounded as float32 is, without tensor cores; TF32 where torch allows it."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
