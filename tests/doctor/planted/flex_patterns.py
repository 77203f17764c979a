"""FlexAttention: windows, prefixes and documents."""

import functools

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(size: int):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < size

    return window


def prefix_lm(length: int):
    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx < length) | (q_idx >= kv_idx)

    return mask_mod


def alibi(heads: int):
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (q_idx - kv_idx)

    return score_mod


class FlexSelfAttention(nn.Module):
    def __init__(self, dim=64, heads=4, window=32):
        super().__init__()
        self.heads = heads
        self.window = window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        block_mask = create_block_mask(sliding_window(self.window), None, None, n, n, device=x.device.type)
        y = flex_attention(q, k, v, block_mask=block_mask)
        return self.out(y.transpose(1, 2).reshape(b, n, c))


compiled_flex = torch.compile(flex_attention, dynamic=False)


@functools.lru_cache
def cached_block_mask(kind: str, length: int, device: str) -> BlockMask:
    mask_mod = causal if kind == "causal" else prefix_lm(int(kind.removeprefix("prefix")))
    return create_block_mask(mask_mod, None, None, length, length, device=device)


class CompiledFlexAttention(nn.Module):
    def __init__(self, dim=64, heads=4, kind="causal"):
        super().__init__()
        self.heads, self.kind = heads, kind
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = compiled_flex(q, k, v, block_mask=cached_block_mask(self.kind, n, x.device.type))
        return self.out(y.transpose(1, 2).reshape(b, n, c))
