"""Windows over pictures, after Swin."""

import torch
import torch.nn as nn


def window_partition(x, size):
    b, h, w, c = x.shape
    return x.view(b, h // size, size, w // size, size, c).transpose(2, 3).reshape(-1, size * size, c)


def window_reverse(windows, size, h, w):
    b = windows.shape[0] // ((h // size) * (w // size))
    return windows.view(b, h // size, w // size, size, size, -1).transpose(2, 3).reshape(b, h, w, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim, window, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        y, x = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        points = torch.stack([y.flatten(), x.flatten()])
        relative = (points[:, :, None] - points[:, None, :]) + window - 1
        self.register_buffer("index", relative[0] * (2 * window - 1) + relative[1], persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1) + self.table[self.index].permute(2, 0, 1)
        if mask is not None:
            windows = mask.shape[0]
            attn = attn.view(b // windows, windows, self.heads, n, n) + mask[:, None]
            attn = attn.view(-1, self.heads, n, n)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


class ShiftedBlock(nn.Module):
    def __init__(self, dim=32, heads=4, window=4, shift=2, size=8):
        super().__init__()
        self.window, self.shift = window, shift
        self.attn = WindowAttention(dim, window, heads)
        self.norm = nn.LayerNorm(dim)
        regions = torch.zeros(1, size, size, 1)
        parts = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
        for number, (rows, columns) in enumerate((r, c) for r in parts for c in parts):
            regions[:, rows, columns] = number
        regions = window_partition(regions, window).squeeze(-1)
        different = regions[:, None, :] != regions[:, :, None]
        self.register_buffer("mask", different.float() * -100.0)

    def forward(self, x):
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), dims=(1, 2))
        y = self.attn(window_partition(y, self.window))
        y = torch.roll(window_reverse(y, self.window, h, w), (self.shift, self.shift), dims=(1, 2))
        return x + y


class AxialAttention(nn.Module):
    """Rows, then columns."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.rows = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.columns = nn.MultiheadAttention(dim, heads, batch_first=True)

    def along(self, layer, x):
        b, n, m, c = x.shape
        flat = x.reshape(b * n, m, c)
        return layer(flat, flat, flat, need_weights=False)[0].view(b, n, m, c)

    def forward(self, x):
        x = x + self.along(self.rows, x)
        return x + self.along(self.columns, x)
