"""Caches for decoding: immutable values, passed to each step and returned extended."""

from .base import Cache as Cache
from .base import KeyValueStore as KeyValueStore
from .in_place_cache import InPlaceCache as InPlaceCache
from .kv_cache import KVCache as KVCache
from .kv_cache import ProjectedMemory as ProjectedMemory
from .linear_cache import LinearCache as LinearCache

__all__ = ["Cache", "InPlaceCache", "KVCache", "KeyValueStore", "LinearCache", "ProjectedMemory"]
