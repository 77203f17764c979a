"""Kernels: implementations of attention, and the choice among them."""

from ..core.normalizer import register_normalizer as register_normalizer
from .base import Cost as Cost
from .base import Kernel as Kernel
from .base import Result as Result
from .nan_safety import finite_problem as finite_problem
from .nan_safety import zero_nonfinite_inputs as zero_nonfinite_inputs
from .planning.choice import KERNELS as KERNELS
from .planning.choice import choose as choose
from .planning.choice import readable as readable
from .planning.plan import Plan as Plan
from .validation import make_problem as make_problem

__all__ = [
    "KERNELS",
    "Cost",
    "Kernel",
    "Plan",
    "Result",
    "choose",
    "finite_problem",
    "make_problem",
    "readable",
    "register_normalizer",
    "zero_nonfinite_inputs",
]
