"""Lenses: statistics of the attention weights, for `regard.observe`, in memory linear in the lengths.

A lens of one's own implements the protocol `Lens`, which `base` describes.
"""

from .alignment import Alignment as Alignment
from .alignment import AlignmentResult as AlignmentResult
from .alignment import warping_path as warping_path
from .base import Lens as Lens
from .base import LensState as LensState
from .base import NativeReduction as NativeReduction
from .base import Reduction as Reduction
from .base import RowShard as RowShard
from .base import ShardedLens as ShardedLens
from .base import WeightsLayout as WeightsLayout
from .base import WeightTile as WeightTile
from .contribution import Contribution as Contribution
from .distance import Distance as Distance
from .distance import DistanceResult as DistanceResult
from .max_logit import MaxLogit as MaxLogit
from .pooled import Pooled as Pooled
from .segment_mass import Mass as Mass
from .topk import TopK as TopK
from .topk import TopKResult as TopKResult
from .weight_sums import Entropy as Entropy
from .weight_sums import Received as Received
from .weights import Weights as Weights

__all__ = [
    "Alignment",
    "AlignmentResult",
    "Contribution",
    "Distance",
    "DistanceResult",
    "Entropy",
    "Lens",
    "LensState",
    "Mass",
    "MaxLogit",
    "NativeReduction",
    "Pooled",
    "Received",
    "Reduction",
    "RowShard",
    "ShardedLens",
    "TopK",
    "TopKResult",
    "WeightTile",
    "Weights",
    "WeightsLayout",
    "warping_path",
]
