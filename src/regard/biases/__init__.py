"""Biases: numbers added to the scores before the softmax, as functions of positions."""

from .alibi import alibi as alibi
from .alibi import alibi_slopes as alibi_slopes
from .alibi import geometric_slopes as geometric_slopes
from .base import Bias as Bias
from .base import as_bias as as_bias
from .base import tensor as tensor
from .forget_gates import forget_gates as forget_gates
from .gaussian import gaussian as gaussian
from .relative import RelativeBias as RelativeBias
from .relative import clipped as clipped
from .relative import diagonal_sums as diagonal_sums
from .relative import diagonals as diagonals
from .relative import relative as relative
from .score_mod import from_mod as from_mod

__all__ = [
    "Bias",
    "RelativeBias",
    "alibi",
    "alibi_slopes",
    "clipped",
    "forget_gates",
    "from_mod",
    "gaussian",
    "geometric_slopes",
    "relative",
    "tensor",
]
