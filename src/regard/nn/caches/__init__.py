"""Caches for decoding: immutable values, passed to each step and returned extended."""

from ...core.cache_format import CacheFormat as CacheFormat
from ...core.packing import Packing as Packing
from .base import Cache as Cache
from .base import KeyValueStore as KeyValueStore
from .in_place_cache import InPlaceCache as InPlaceCache
from .kv_cache import KVCache as KVCache
from .kv_cache import ProjectedMemory as ProjectedMemory
from .layer_pages import LayerHeads as LayerHeads
from .linear_cache import LinearCache as LinearCache
from .page_pool import PagedSequence as PagedSequence
from .page_pool import PagePool as PagePool
from .paged_memory import PagedMemory as PagedMemory
from .ragged_step import RaggedLayer as RaggedLayer
from .ragged_step import RaggedStep as RaggedStep
from .weighed_cache import WeighedCache as WeighedCache
from .weight_policies import H2O as H2O
from .weight_policies import TOVA as TOVA
from .weight_policies import SnapKV as SnapKV
from .weight_policies import WeightPolicy as WeightPolicy

__all__ = [
    "H2O",
    "TOVA",
    "Cache",
    "CacheFormat",
    "InPlaceCache",
    "KVCache",
    "KeyValueStore",
    "LayerHeads",
    "LinearCache",
    "Packing",
    "PagePool",
    "PagedMemory",
    "PagedSequence",
    "ProjectedMemory",
    "RaggedLayer",
    "RaggedStep",
    "SnapKV",
    "WeighedCache",
    "WeightPolicy",
]
