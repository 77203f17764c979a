"""Attention functions of our own in transformers' models."""

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


def counted_attention(module, query, key, value, attention_mask, **kwargs):
    module.calls = getattr(module, "calls", 0) + 1
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("counted", counted_attention)


def logged_attention(module, query, key, value, attention_mask, **kwargs):
    module.last_shape = tuple(query.shape)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("logged", logged_attention)
AttentionMaskInterface.register("logged", sdpa_mask)


def capped_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, softcap=None, **kwargs):
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scaling = module.head_dim**-0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def plain_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    y = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout,
        is_causal=query.shape[2] > 1,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return y.transpose(1, 2).contiguous(), None


def use(model, name: str):
    model.config._attn_implementation = name
    return model
