"""A causal mask and one of padding as one that is added to the scores."""

import torch
import torch.nn.functional as F


def additive_mask(keep_tokens, dtype):
    """keep_tokens (batch, length), True where a token is read."""
    length = keep_tokens.size(1)
    lowest = torch.finfo(dtype).min
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    causal = torch.zeros(length, length, dtype=dtype).masked_fill(later, lowest)
    padding = torch.zeros(keep_tokens.shape, dtype=dtype).masked_fill(~keep_tokens, lowest)
    return causal[None, None] + padding[:, None, None, :]


def attend(q, k, v, keep_tokens):
    scores = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
    return F.softmax(scores + additive_mask(keep_tokens, scores.dtype), dim=-1) @ v
