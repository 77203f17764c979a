import torch.nn as nn


class StripeAttention(nn.Module):
    """Attention inside horizontal stripes of a feature map."""

    def __init__(self, channels=32, heads=4, stripe=4):
        super().__init__()
        self.stripe = stripe
        self.norm = nn.LayerNorm(channels)
        self.attn = nn.MultiheadAttention(channels, heads, dropout=0.0)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def forward(self, src):
        b, c, h, w = src.shape
        rows = h // self.stripe
        x = src.view(b, c, rows, self.stripe, w)
        x = x.permute(0, 2, 3, 4, 1).reshape(b * rows, self.stripe * w, c)
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        x = x + self.mlp(x)
        x = x.reshape(b, rows, self.stripe, w, c).permute(0, 4, 1, 2, 3)
        return x.reshape(b, c, h, w)
