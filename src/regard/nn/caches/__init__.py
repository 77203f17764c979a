"""Caches: what decoding keeps of the positions before, as values that are passed in and returned."""

from .cross_attention import MemoryCache as MemoryCache
from .kv_cache import KVCache as KVCache

__all__ = ["KVCache", "MemoryCache"]
