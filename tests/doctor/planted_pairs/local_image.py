"""Attention of blocks of an image to themselves and a rim around them."""

import torch
import torch.nn.functional as F
from torch import nn


class RimAttention(nn.Module):
    def __init__(self, dim, block=8, rim=3, dim_head=32):
        super().__init__()
        self.block, self.rim, self.scale = block, rim, dim_head**-0.5
        self.to_q = nn.Linear(dim, dim_head, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim_head, bias=False)
        self.to_out = nn.Linear(dim_head, dim)

    def forward(self, image):
        b, c, h, w = image.shape
        size = self.block + 2 * self.rim
        inside = F.unfold(image, self.block, stride=self.block).view(b, c, self.block**2, -1).permute(0, 3, 2, 1)
        around = F.unfold(image, size, stride=self.block, padding=self.rim).view(b, c, size**2, -1).permute(0, 3, 2, 1)
        q = self.to_q(inside) * self.scale
        k, v = self.to_kv(around).chunk(2, dim=-1)
        sim = q @ k.transpose(-1, -2)
        ones = torch.ones(1, 1, h, w, device=image.device)
        valid = F.unfold(ones, size, stride=self.block, padding=self.rim).permute(0, 2, 1)[:, :, None, :].bool()
        sim = sim.masked_fill(valid, -torch.finfo(sim.dtype).max)
        return self.to_out(sim.softmax(dim=-1) @ v)
