import torch
import torch.nn as nn
import torch.nn.functional as F


class WindowAttention(nn.Module):
    """Attention in square windows with a learned bias for each relative offset."""

    def __init__(self, dim=48, window=4, heads=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        axis = torch.arange(window)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).flatten(1)
        offset = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        index = offset[..., 0] * (2 * window - 1) + offset[..., 1]
        self.register_buffer("index", index, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 1, 0).contiguous()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        return self.proj(out.transpose(1, 2).reshape(b, n, c))
