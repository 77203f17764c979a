"""Masks of a model whose layers read the newest sliding_window keys, their own among them."""

import torch
import torch.nn.functional as F


def make_mask(length, offset=0, sliding_window=None):
    keys = torch.arange(offset + length)
    queries = torch.arange(offset, offset + length)[:, None]
    mask = queries >= keys
    if sliding_window is not None:
        mask = mask & (queries <= keys + sliding_window)
    return mask


def attend(q, k, v, sliding_window):
    """Each query reads sliding_window keys: itself and the sliding_window - 1 before it."""
    mask = make_mask(q.size(-2), k.size(-2) - q.size(-2), sliding_window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
