"""Masks: which pairs of query and key exist, as symbols with `&`, `|` and `~`; True = attend."""

from .base import Mask as Mask
from .base import as_mask as as_mask
from .causal import causal as causal
from .documents import documents as documents
from .from_mod import from_mod as from_mod
from .global_tokens import global_tokens as global_tokens
from .padding import padding as padding
from .prefix import prefix as prefix
from .random_blocks import random_blocks as random_blocks
from .strided import dilated as dilated
from .strided import fixed as fixed
from .strided import strided as strided
from .where import where as where
from .window import window as window

__all__ = [
    "Mask",
    "causal",
    "dilated",
    "documents",
    "fixed",
    "from_mod",
    "global_tokens",
    "padding",
    "prefix",
    "random_blocks",
    "strided",
    "where",
    "window",
]
