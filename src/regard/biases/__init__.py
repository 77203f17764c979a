"""Biases: numbers added to the scores before the softmax, as functions of positions."""

from .adaptive_span import AdaptiveSpan as AdaptiveSpan
from .adaptive_span import adaptive_span as adaptive_span
from .alibi import alibi as alibi
from .alibi import alibi_slopes as alibi_slopes
from .alibi import geometric_slopes as geometric_slopes
from .base import Bias as Bias
from .base import as_bias as as_bias
from .base import tensor as tensor
from .cope import cope as cope
from .fire import fire as fire
from .forget_gates import forget_gates as forget_gates
from .gaussian import gaussian as gaussian
from .householder_products import path as path
from .kerple import kerple_log as kerple_log
from .kerple import kerple_power as kerple_power
from .landmarks import landmarks as landmarks
from .relative import RelativeBias as RelativeBias
from .relative import clipped as clipped
from .relative import diagonal_sums as diagonal_sums
from .relative import diagonals as diagonals
from .relative import relative as relative
from .relative_vectors import deberta as deberta
from .relative_vectors import shaw as shaw
from .relative_vectors import transformer_xl as transformer_xl
from .score_mod import from_mod as from_mod
from .tupe import tupe as tupe

__all__ = [
    "AdaptiveSpan",
    "Bias",
    "RelativeBias",
    "adaptive_span",
    "alibi",
    "alibi_slopes",
    "clipped",
    "cope",
    "deberta",
    "fire",
    "forget_gates",
    "from_mod",
    "gaussian",
    "geometric_slopes",
    "kerple_log",
    "kerple_power",
    "landmarks",
    "path",
    "relative",
    "shaw",
    "tensor",
    "transformer_xl",
    "tupe",
]
