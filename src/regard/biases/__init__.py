"""Biases: numbers added to the scores before the softmax."""

from .base import Bias as Bias
from .base import as_bias as as_bias
from .base import tensor as tensor
from .gaussian import gaussian as gaussian

__all__ = ["Bias", "gaussian", "tensor"]
