"""Lenses: what is looked at in the weights, without asking a kernel to keep them."""

from .alignment import Aligned as Aligned
from .alignment import Alignment as Alignment
from .alignment import warping_path as warping_path
from .base import Lens as Lens
from .base import Look as Look
from .base import NativeReduction as NativeReduction
from .base import Reduction as Reduction
from .base import Tile as Tile
from .distance import Distance as Distance
from .distance import Distances as Distances
from .entropy import Entropy as Entropy
from .pooled import Pooled as Pooled
from .received import Received as Received
from .segment_mass import Mass as Mass
from .topk import Top as Top
from .topk import TopK as TopK
from .weights import Weights as Weights

__all__ = [
    "Aligned",
    "Alignment",
    "Distance",
    "Distances",
    "Entropy",
    "Lens",
    "Look",
    "Mass",
    "NativeReduction",
    "Pooled",
    "Received",
    "Reduction",
    "Tile",
    "Top",
    "TopK",
    "Weights",
    "warping_path",
]
