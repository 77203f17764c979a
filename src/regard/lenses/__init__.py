"""Lenses: what is looked at in the weights, without asking a kernel to keep them."""

from .weights import Lens as Lens
from .weights import Weights as Weights

__all__ = ["Lens", "Weights"]
