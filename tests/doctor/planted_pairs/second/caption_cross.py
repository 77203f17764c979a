import torch
import torch.nn as nn
import torch.nn.functional as F


class CrossAttention(nn.Module):
    """Text tokens attend to the patches of an image."""

    def __init__(self, dim=64, context_dim=96, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(context_dim, dim, bias=False)
        self.to_v = nn.Linear(context_dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context, context_mask=None):
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        if context_mask is not None:
            context_mask = context_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=context_mask)
        return self.to_out(out.transpose(1, 2).flatten(2))


class CaptionLayer(nn.Module):
    def __init__(self, dim=64, context_dim=96, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.cross_attn = CrossAttention(dim, context_dim, heads)

    def forward(self, text, patches, text_valid, patch_valid):
        n = text.size(1)
        future = torch.ones(n, n, dtype=torch.bool, device=text.device).triu(1)
        y = self.norm1(text)
        y, _ = self.self_attn(y, y, y, attn_mask=future, key_padding_mask=~text_valid, need_weights=False)
        text = text + y
        return text + self.cross_attn(self.norm2(text), patches, context_mask=text_valid)
