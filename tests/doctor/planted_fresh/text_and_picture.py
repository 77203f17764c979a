"""Two towers, of texts and of pictures, trained to agree."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class QuickGELU(nn.Module):
    def forward(self, x: torch.Tensor):
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model: int, n_head: int, attn_mask: torch.Tensor = None):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head)
        self.ln_1 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", nn.Linear(d_model, d_model * 4)),
                    ("gelu", QuickGELU()),
                    ("c_proj", nn.Linear(d_model * 4, d_model)),
                ]
            )
        )
        self.ln_2 = nn.LayerNorm(d_model)
        self.attn_mask = attn_mask

    def attention(self, x: torch.Tensor):
        mask = self.attn_mask.to(dtype=x.dtype, device=x.device) if self.attn_mask is not None else None
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x: torch.Tensor):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TextTower(nn.Module):
    def __init__(self, vocab=60, context_length=40, width=32, layers=2, heads=4):
        super().__init__()
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.randn(context_length, width))
        mask = self.build_attention_mask()
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(width, heads, mask) for _ in range(layers)])
        self.ln_final = nn.LayerNorm(width)

    def build_attention_mask(self):
        mask = torch.empty(self.context_length, self.context_length)
        mask.fill_(float("-inf"))
        mask.tril_(-1)
        return mask

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x = self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2)
        return self.ln_final(x)


class WindowAttention(nn.Module):
    """Attention in windows of a picture with a learned bias for each offset."""

    def __init__(self, dim=32, window_size=(4, 4), num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        size = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(size, num_heads))
        coords = torch.stack(torch.meshgrid(*(torch.arange(w) for w in window_size), indexing="ij")).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0)
        relative = (relative[..., 0] + window_size[0] - 1) * (2 * window_size[1] - 1) + relative[..., 1]
        self.register_buffer("relative_position_index", relative + window_size[1] - 1)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = F.softmax(q @ k.transpose(-2, -1), dim=-1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        attn = attn + bias.view(N, N, -1).permute(2, 0, 1).unsqueeze(0)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


class PictureBlock(nn.Module):
    def __init__(self, dim=32, heads=4, attn_drop=0.1):
        super().__init__()
        self.heads = heads
        self.attn_drop = nn.Dropout(attn_drop)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p)
        return self.proj(x.transpose(1, 2).flatten(2))
