"""Conversion between masks and those of torch, FlexAttention, Hugging Face, flash-attn and xformers."""

from .block_mask import from_block_mask as from_block_mask
from .block_mask import to_block_mask as to_block_mask
from .block_mask import to_mask_mod as to_mask_mod
from .huggingface_masks import from_huggingface as from_huggingface
from .huggingface_masks import to_huggingface as to_huggingface
from .huggingface_masks import to_padding_mask as to_padding_mask
from .torch_tensors import from_multihead as from_multihead
from .torch_tensors import from_sdpa as from_sdpa
from .torch_tensors import to_multihead as to_multihead
from .torch_tensors import to_sdpa as to_sdpa
from .varlen import from_cu_seqlens as from_cu_seqlens
from .varlen import from_window_size as from_window_size
from .varlen import to_cu_seqlens as to_cu_seqlens
from .varlen import to_window_size as to_window_size
from .xformers_biases import from_xformers as from_xformers
