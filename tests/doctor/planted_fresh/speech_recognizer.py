"""Speech to text: an encoder of frames, a decoder of words with a cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None, kv_cache=None):
        q = self.query(x)
        if kv_cache is None or xa is None or self.key not in kv_cache:
            k = self.key(x if xa is None else xa)
            v = self.value(x if xa is None else xa)
            if kv_cache is not None:
                if xa is None and self.key in kv_cache:
                    k = torch.cat([kv_cache[self.key], k], dim=1)
                    v = torch.cat([kv_cache[self.value], v], dim=1)
                kv_cache[self.key], kv_cache[self.value] = k, v
        else:
            k, v = kv_cache[self.key], kv_cache[self.value]
        return self.out(self.qkv_attention(q, k, v, mask))

    def qkv_attention(self, q, k, v, mask=None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1)
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask
        w = F.softmax(qk.float(), dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, cross_attention: bool = False):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, 4 * n_state), nn.GELU(), nn.Linear(4 * n_state, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, xa=None, mask=None, audio_mask=None, kv_cache=None):
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)
        return x + self.mlp(self.mlp_ln(x))


class TextDecoder(nn.Module):
    def __init__(self, n_vocab=60, n_ctx=128, n_state=32, n_head=4, n_layer=2):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(torch.randn(n_ctx, n_state))
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, True) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_state)

    def forward(self, tokens, audio, audio_mask=None, kv_cache=None):
        kv_cache = {} if kv_cache is None else kv_cache
        first = self.blocks[0].attn.key
        offset = kv_cache[first].shape[1] if first in kv_cache else 0
        n = tokens.shape[-1]
        x = self.token_embedding(tokens) + self.positional_embedding[:n]
        mask = torch.full((n, offset + n), float("-inf")).triu(1 + offset)
        bias = None
        if audio_mask is not None:
            bias = torch.zeros(audio_mask.shape).masked_fill(~audio_mask, float("-inf"))[:, None, None]
        for block in self.blocks:
            x = block(x, audio, mask=mask, audio_mask=bias, kv_cache=kv_cache)
        logits = self.ln(x) @ self.token_embedding.weight.t()
        return logits, kv_cache
