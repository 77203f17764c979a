"""Attention over a sequence that is cut over several processes, exact for any mask, bias and dropout."""

from .layout import Contiguous as Contiguous
from .layout import RingLayout as RingLayout
from .layout import Striped as Striped
from .layout import Zigzag as Zigzag
from .layout import balanced as balanced
from .linear_lenses import observe_linear_attention as observe_linear_attention
from .linear_ring import linear_attention as linear_attention
from .linear_ring import linear_attention_with_state as linear_attention_with_state
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
    "linear_attention",
    "linear_attention_with_state",
    "observe",
    "observe_linear_attention",
    "shard",
    "sharded",
    "unshard",
]
