"""Biases: numbers added to the scores before the softmax."""

from .alibi import alibi as alibi
from .alibi import alibi_slopes as alibi_slopes
from .alibi import geometric_slopes as geometric_slopes
from .base import Bias as Bias
from .base import as_bias as as_bias
from .base import tensor as tensor
from .clipped import clipped as clipped
from .distances import RelativeBias as RelativeBias
from .distances import diagonal_sums as diagonal_sums
from .distances import diagonals as diagonals
from .from_mod import from_mod as from_mod
from .gaussian import gaussian as gaussian
from .relative import relative as relative

__all__ = [
    "Bias",
    "RelativeBias",
    "alibi",
    "alibi_slopes",
    "clipped",
    "from_mod",
    "gaussian",
    "geometric_slopes",
    "relative",
    "tensor",
]
