"""Attention for Hugging Face transformers: `attn_implementation="regard"`, for every model that supports selection.

>>> import torch, regard.huggingface
>>> regard.huggingface.register()
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> config = LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="regard")
>>> model(torch.arange(5)[None], output_attentions=True).attentions[0].shape
torch.Size([1, 2, 5, 5])
"""

from .attention_function import NAME as NAME
from .mask_tensor import LazyMaskTensor as LazyMaskTensor
from .observe_model import Views as Views
from .observe_model import observing as observing
from .register import AttentionSwapReport as AttentionSwapReport
from .register import register as register
from .register import swap as swap
from .word_times import TimedWord as TimedWord
from .word_times import word_times as word_times

__all__ = [
    "NAME",
    "AttentionSwapReport",
    "LazyMaskTensor",
    "TimedWord",
    "Views",
    "observing",
    "register",
    "swap",
    "word_times",
]
