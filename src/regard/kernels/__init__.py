"""Kernels: the ways to compute a Problem, and the choice among them."""

from .base import Cost as Cost
from .base import Kernel as Kernel
from .base import Result as Result
from .plan import KERNELS as KERNELS
from .plan import Plan as Plan
from .plan import choose as choose
from .shield import cleaned as cleaned

__all__ = ["KERNELS", "Cost", "Kernel", "Plan", "Result", "choose", "cleaned"]
