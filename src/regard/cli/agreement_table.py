"""The kernels against the oracle on a device: the table of `regard bench --agreement`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from regard.errors import DeviceError
from regard.kernels import KERNELS, Kernel
from regard.testing import Case, cases, long_cases, measure_agreement, suite


@dataclass(frozen=True, slots=True)
class KernelAgreement:
    """How many cases a kernel computed, its largest error as a share of the budget, and where; faults by case."""

    kernel: str
    cases: int
    worst: float
    worst_case: str
    faults: tuple[str, ...]


def checked_device(name: str) -> torch.device:
    """The device of that name, which this machine has.

    Raises:
        DeviceError: there is no such device here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise DeviceError(
            f"kernels cannot be compared on the device {name!r}: {first}. `--device cpu` is on every machine; cuda "
            "needs a GPU and a build of torch for it"
        ) from None
    return device


def measured_agreements(device: torch.device, most: int) -> Iterator[KernelAgreement]:
    """The agreement of each kernel with the oracle, over at most so many of the cases that it admits.

    They are taken evenly from small cases, any two of whose choices occur together, and from long ones.
    """
    admitted: dict[str, list[Case]] = {kernel.name: [] for kernel in KERNELS}
    for kernel, case in suite(KERNELS, among=[*cases(2), *long_cases()], device=device):
        admitted[kernel.name].append(case)
    for kernel in KERNELS:
        among = admitted[kernel.name]
        yield _measure(kernel, among[:: -(-len(among) // most)] if among else [], device)


def _measure(kernel: Kernel, among: list[Case], device: torch.device) -> KernelAgreement:
    worst, worst_case, faults = 0.0, "", []
    for case in among:
        try:
            agreement = measure_agreement(kernel, case, device)
        except Exception as error:  # a device may fail in any way, and the other cases are of interest
            share, wrong = float("inf"), (f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}",)
        else:
            share, wrong = agreement.worst, agreement.faults
        faults += [f"{kernel.name} on {case.id}: {fault}" for fault in wrong]
        if share > worst or not worst_case:
            worst, worst_case = share, case.id
    return KernelAgreement(kernel.name, len(among), worst, worst_case, tuple(faults))
