"""Scores f(q, k): dot products, additive scores and location, as modules; and the two pair forms they compute."""

from ..core.score_forms import AdditivePairs as AdditivePairs
from ..core.score_forms import DotPairs as DotPairs
from .base import Score as Score
from .dot import Dot as Dot
from .dot import General as General
from .dot import ScaledDot as ScaledDot
from .location import Location as Location
from .tanh import Additive as Additive
from .tanh import Concat as Concat

__all__ = [
    "Additive",
    "AdditivePairs",
    "Concat",
    "Dot",
    "DotPairs",
    "General",
    "Location",
    "ScaledDot",
    "Score",
]
