"""Scores f(q, k): dot products, additive scores and location, as modules; and the two pair forms they compute."""

from ..core.score_forms import AdditivePairs as AdditivePairs
from ..core.score_forms import DotPairs as DotPairs
from .score_functions import Additive as Additive
from .score_functions import Concat as Concat
from .score_functions import Dot as Dot
from .score_functions import General as General
from .score_functions import Location as Location
from .score_functions import ScaledDot as ScaledDot
from .score_functions import Score as Score

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
