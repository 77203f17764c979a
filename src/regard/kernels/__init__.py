"""Kernels: implementations of attention, and the choice among them."""

from .base import Cost as Cost
from .base import Kernel as Kernel
from .base import Result as Result
from .dispatch import KERNELS as KERNELS
from .dispatch import Plan as Plan
from .dispatch import choose as choose
from .nan_safety import zero_nonfinite_inputs as zero_nonfinite_inputs

__all__ = ["KERNELS", "Cost", "Kernel", "Plan", "Result", "choose", "zero_nonfinite_inputs"]
