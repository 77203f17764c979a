"""Approximations of softmax attention, measured against it: on tensors, and in each layer of a model."""

from .cache_choice import CacheChoice as CacheChoice
from .cache_choice import choose_cache as choose_cache
from .comparison import Approximation as Approximation
from .comparison import approximation as approximation
from .deviation import LensResults as LensResults
from .deviation import WeightErrors as WeightErrors
from .gaussian_nystrom import soft_attention as soft_attention
from .layerwise import ModelApproximation as ModelApproximation
from .layerwise import model_approximation as model_approximation
from .measures import CosineSimilarity as CosineSimilarity
from .measures import Divergence as Divergence
from .measures import Measure as Measure
from .measures import Perplexity as Perplexity
from .methods import Linearized as Linearized
from .methods import Linformer as Linformer
from .methods import Masked as Masked
from .methods import Method as Method
from .methods import RandomProjection as RandomProjection
from .methods import Rounded as Rounded
from .methods import SegmentMeans as SegmentMeans
from .nystrom import Nystrom as Nystrom
from .nystrom import nystrom_attention as nystrom_attention
from .nystrom import pseudo_inverse as pseudo_inverse
from .nystrom import segment_means as segment_means
from .randomized import Lara as Lara
from .randomized import lara_attention as lara_attention
from .stored import Stored as Stored
from .timing import Timings as Timings

__all__ = [
    "Approximation",
    "CacheChoice",
    "CosineSimilarity",
    "Divergence",
    "Lara",
    "LensResults",
    "Linearized",
    "Linformer",
    "Masked",
    "Measure",
    "Method",
    "ModelApproximation",
    "Nystrom",
    "Perplexity",
    "RandomProjection",
    "Rounded",
    "SegmentMeans",
    "Stored",
    "Timings",
    "WeightErrors",
    "approximation",
    "choose_cache",
    "lara_attention",
    "model_approximation",
    "nystrom_attention",
    "pseudo_inverse",
    "segment_means",
    "soft_attention",
]
