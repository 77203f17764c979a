"""Caches: what decoding keeps of the positions before, as values that are passed in and returned."""

from .kv import KVCache as KVCache
from .memory import MemoryCache as MemoryCache

__all__ = ["KVCache", "MemoryCache"]
