"""A translator with (time, batch, channel) tensors and state for decoding step by step."""

import math

import torch
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    def __init__(self, dim: int, padding_idx: int, size: int = 512):
        super().__init__()
        self.padding_idx = padding_idx
        rate = torch.exp(torch.arange(0, dim, 2) * -(math.log(10000.0) / dim))
        angles = torch.arange(size)[:, None] * rate
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        # sources come padded on the left
        length = tokens.size(1)
        return self.table[start : start + length].unsqueeze(0).expand(tokens.size(0), -1, -1)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        saved: dict[str, Tensor] | None = None,
    ) -> Tensor:
        tgt_len, bsz, _ = query.size()
        q = self.q_proj(query) * self.scaling
        k, v = self.k_proj(key), self.v_proj(key)
        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        if saved is not None:
            if "prev_key" in saved:
                k = torch.cat([saved["prev_key"], k], dim=1)
                v = torch.cat([saved["prev_value"], v], dim=1)
                key_padding_mask = None
            saved["prev_key"], saved["prev_value"] = k, v
        src_len = k.size(1)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if attn_mask is not None:
            attn_weights += attn_mask.unsqueeze(0)
        if key_padding_mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, src_len)
            attn_weights = attn_weights.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2), float("-inf"))
            attn_weights = attn_weights.view(bsz * self.num_heads, tgt_len, src_len)
        attn_probs = torch.softmax(attn_weights.float(), dim=-1).type_as(attn_weights)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, self.embed_dim)
        return self.out_proj(attn)


class Encoder(nn.Module):
    def __init__(self, vocab: int = 60, dim: int = 32, heads: int = 4, padding_idx: int = 0):
        super().__init__()
        self.padding_idx, self.dim = padding_idx, dim
        self.embed = nn.Embedding(vocab, dim, padding_idx)
        self.positions = SinusoidalPositions(dim, padding_idx)
        self.attention = MultiheadAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens.eq(self.padding_idx)
        x = math.sqrt(self.dim) * self.embed(tokens) + self.positions(tokens)
        x = x.transpose(0, 1)
        x = self.norm(x + self.attention(x, x, key_padding_mask=padding))
        return x.transpose(0, 1)


class Decoder(nn.Module):
    """Left-padded prompts, then token after token."""

    def __init__(self, vocab: int = 60, dim: int = 32, heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = MultiheadAttention(dim, heads)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, padding_mask: Tensor | None = None, cache: dict[str, Tensor] | None = None):
        cache = {} if cache is None else cache
        x = self.embed(tokens).transpose(0, 1)
        n = tokens.size(1)
        past = cache["prev_key"].size(1) if "prev_key" in cache else 0
        future = torch.full((n, past + n), float("-inf"), device=tokens.device).triu(1 + past)
        x = x + self.attention(x, x, padding_mask, future, cache)
        return self.out(x.transpose(0, 1)), cache


class BatchFirstBlock(nn.Module):
    """The same attention for inputs (batch, time, channel)."""

    def __init__(self, dim: int = 32, heads: int = 4):
        super().__init__()
        self.attention = MultiheadAttention(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, channels = x.shape
        out = self.attention(x.reshape(time, batch, channels), x.reshape(time, batch, channels))
        return x + out.reshape(batch, time, channels)
