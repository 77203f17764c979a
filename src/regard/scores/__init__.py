"""Scores: six functions f(q, k), two pair forms."""

from ..pairs import AdditivePairs as AdditivePairs
from ..pairs import DotPairs as DotPairs
from .additive import Additive as Additive
from .additive import Concat as Concat
from .base import Score as Score
from .dot import Dot as Dot
from .dot import General as General
from .dot import ScaledDot as ScaledDot
from .location import Location as Location

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
