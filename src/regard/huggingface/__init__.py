"""The plug for Hugging Face: `attn_implementation="regard"` for every model of transformers that lets one choose.

>>> import torch, regard.huggingface
>>> regard.huggingface.register()
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> config = LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
>>> model = LlamaForCausalLM._from_config(config, attn_implementation="regard")
>>> model(torch.arange(5)[None], output_attentions=True).attentions[0].shape
torch.Size([1, 2, 5, 5])
"""

from .observing import Views as Views
from .observing import observing as observing
from .plugging import NAME as NAME
from .plugging import Swapped as Swapped
from .plugging import register as register
from .plugging import swap as swap
from .symbolic import SymbolicMask as SymbolicMask

__all__ = ["NAME", "Swapped", "SymbolicMask", "Views", "observing", "register", "swap"]
