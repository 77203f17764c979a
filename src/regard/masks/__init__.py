"""Masks: which pairs of query and key exist, as symbolic expressions with `&`, `|` and `~`; True = attend."""

from .base import Mask as Mask
from .base import as_mask as as_mask
from .causal import causal as causal
from .chosen import blocks as blocks
from .chosen import chosen as chosen
from .convert import from_block_mask as from_block_mask
from .convert import from_cu_seqlens as from_cu_seqlens
from .convert import from_huggingface as from_huggingface
from .convert import from_multihead as from_multihead
from .convert import from_sdpa as from_sdpa
from .convert import from_window_size as from_window_size
from .convert import from_xformers as from_xformers
from .convert import to_block_mask as to_block_mask
from .convert import to_cu_seqlens as to_cu_seqlens
from .convert import to_huggingface as to_huggingface
from .convert import to_mask_mod as to_mask_mod
from .convert import to_multihead as to_multihead
from .convert import to_padding_mask as to_padding_mask
from .convert import to_sdpa as to_sdpa
from .convert import to_window_size as to_window_size
from .documents import documents as documents
from .mask_mod import from_mod as from_mod
from .padding import padding as padding
from .prefix import prefix as prefix
from .sparse_patterns import dilated as dilated
from .sparse_patterns import fixed as fixed
from .sparse_patterns import global_tokens as global_tokens
from .sparse_patterns import random_blocks as random_blocks
from .sparse_patterns import strided as strided
from .tensor_mask import where as where
from .window import window as window

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chosen",
    "dilated",
    "documents",
    "fixed",
    "from_block_mask",
    "from_cu_seqlens",
    "from_huggingface",
    "from_mod",
    "from_multihead",
    "from_sdpa",
    "from_window_size",
    "from_xformers",
    "global_tokens",
    "padding",
    "prefix",
    "random_blocks",
    "strided",
    "to_block_mask",
    "to_cu_seqlens",
    "to_huggingface",
    "to_mask_mod",
    "to_multihead",
    "to_padding_mask",
    "to_sdpa",
    "to_window_size",
    "where",
    "window",
]
