"""Attention over a sequence that is cut over several processes, exact for any mask, bias and dropout."""

from .layout import Contiguous as Contiguous
from .layout import RingLayout as RingLayout
from .layout import Striped as Striped
from .layout import Zigzag as Zigzag
from .layout import balanced as balanced
from .ring_attention import attention as attention
from .ring_attention import attention_with_lse as attention_with_lse
from .shard_lenses import observe as observe
from .sharded_decode import decode as decode
from .sharded_models import sharded as sharded
from .sharding import shard as shard
from .sharding import unshard as unshard

__all__ = [
    "Contiguous",
    "RingLayout",
    "Striped",
    "Zigzag",
    "attention",
    "attention_with_lse",
    "balanced",
    "decode",
    "observe",
    "shard",
    "sharded",
    "unshard",
]
