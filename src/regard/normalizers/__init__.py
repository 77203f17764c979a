"""Normalizers: what takes the place of softmax, `regard.attention(..., normalizer=regard.normalizers.Sigmoid())`.

Each turns the scores s_ij of a row, over the keys j that query i attends to, into weights w_ij; the output is
Σ_j w_ij · value_j. None, the default, is softmax.

| normalizer | w_ij | row sums | log-sum-exp |
| --- | --- | --- | --- |
| `Sigmoid` | σ(s + b) | any | no: parts are added |
| `HashCollisions` | (1 - arccos(s) / π)^τ | any | no: parts are added |
| `Softmax1` | e^s / (1 + Σ e^s) | below 1 | yes |
| `Softpick` | relu(e^s - 1) / Σ abs(e^s - 1) | at most 1 | yes |
| `ReLU` | relu(s)^p / Σ relu(s)^p | 1, or 0 | yes |
| `Sparsemax` | max(s - τ, 0) | 1 | no |
| `Entmax` | max((α - 1) s - τ, 0)^(1/(α - 1)) | 1 | no |
| `StickBreaking` | σ(s_j) Π_{k>j} (1 - σ(s_k)) | at most 1 | no |
| `TopScores` | softmax over the k largest | 1 | no |
| `Hard` | 1 for the largest | 1 | no |
| `TalkingHeads` | softmax of mixed scores, mixed: Σ_h A_gh softmax(Σ_e B_he s_e) | any | no |
| `MultiToken` | the same, with convolutions over neighbouring queries and keys | any | no |
| `LinearChain` | p(z_j = 1), where the choices of neighbouring keys are a chain | any | no |
| `DependencyTrees` | p(the parent of token i is token j), over all trees of the tokens | 1 | no |
| `ProjectiveTrees` | the same, over those whose arcs do not cross | 1 | no |
| `Monotonic`, `MoChA` | the probability of stopping at key j, from where the query before did | at most 1 | no |
"""

from ..core.normalizer import Normalizer as Normalizer
from ..core.normalizer import OrderedNormalizer as OrderedNormalizer
from ..core.normalizer import RatioNormalizer as RatioNormalizer
from .dependency_trees import DependencyTrees as DependencyTrees
from .entmax import Entmax as Entmax
from .entmax import Sparsemax as Sparsemax
from .hard import Hard as Hard
from .hash_collisions import HashCollisions as HashCollisions
from .linear_chain import LinearChain as LinearChain
from .monotonic import MoChA as MoChA
from .monotonic import Monotonic as Monotonic
from .multi_token import MultiToken as MultiToken
from .projective_trees import ProjectiveTrees as ProjectiveTrees
from .ratios import ReLU as ReLU
from .ratios import Softmax1 as Softmax1
from .ratios import Softpick as Softpick
from .sigmoid import Sigmoid as Sigmoid
from .stick_breaking import StickBreaking as StickBreaking
from .talking_heads import TalkingHeads as TalkingHeads
from .top_scores import TopScores as TopScores

__all__ = [
    "DependencyTrees",
    "Entmax",
    "Hard",
    "HashCollisions",
    "LinearChain",
    "MoChA",
    "Monotonic",
    "MultiToken",
    "Normalizer",
    "OrderedNormalizer",
    "ProjectiveTrees",
    "RatioNormalizer",
    "ReLU",
    "Sigmoid",
    "Softmax1",
    "Softpick",
    "Sparsemax",
    "StickBreaking",
    "TalkingHeads",
    "TopScores",
]
