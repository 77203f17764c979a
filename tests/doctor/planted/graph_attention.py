"""Molecules: attention over atoms with a bias from the bonds."""

import torch
from torch import nn
from torch.nn import functional as F


class BiasedAttention(nn.Module):
    def __init__(self, dim=64, heads=4, dropout=0.1):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.bond = nn.Embedding(5, heads)
        self.out = nn.Linear(dim, dim)

    def forward(self, atoms, bonds, mask):
        """atoms (batch, n, dim), bonds (batch, n, n), mask (batch, n): 1 for an atom, 0 for padding."""
        b, n, d = atoms.shape
        q, k, v = self.qkv(atoms).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        bias = self.bond(bonds).permute(0, 3, 1, 2)
        bias = bias + mask[:, None, None, :].float()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class GlobalPool(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, atoms, mask):
        scores = self.score(atoms).squeeze(-1).masked_fill(mask == 0, float("-inf"))
        weights = F.softmax(scores, dim=0)
        return torch.einsum("bn,bnd->bd", weights, atoms)


class NeighbourAttention(nn.Module):
    """Each atom attends to its neighbours alone."""

    def __init__(self, dim=64):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, atoms, adjacency):
        scores = torch.bmm(self.q(atoms), self.k(atoms).transpose(1, 2))
        scores = scores.masked_fill(~adjacency, float("-inf"))
        return torch.bmm(torch.softmax(scores, dim=-1), self.v(atoms))


class GraphTransformer(nn.Module):
    def __init__(self, kinds=20, dim=64, depth=2):
        super().__init__()
        self.atom = nn.Embedding(kinds, dim)
        self.layers = nn.ModuleList([BiasedAttention(dim) for _ in range(depth)])
        self.neighbours = NeighbourAttention(dim)
        self.pool = GlobalPool(dim)

    def forward(self, kinds, bonds, mask):
        x = self.atom(kinds)
        for layer in self.layers:
            x = x + layer(x, bonds, mask)
        return self.pool(x + self.neighbours(x, bonds > 0), mask)
