"""Masks: which pairs of query and key exist, as symbols with `&`, `|` and `~`; True = attend."""

from .base import Mask as Mask
from .base import as_mask as as_mask
from .causal import causal as causal
from .padding import padding as padding
from .where import where as where

__all__ = ["Mask", "causal", "padding", "where"]
