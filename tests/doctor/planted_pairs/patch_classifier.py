"""A small classifier of image patches."""

import torch
from torch import nn


class PatchMixer(nn.Module):
    def __init__(self, feats: int, n_head: int = 8):
        super().__init__()
        self.feats, self.n_head = feats, n_head
        self.root = feats**0.5
        self.to_q = nn.Linear(feats, feats)
        self.to_k = nn.Linear(feats, feats)
        self.to_v = nn.Linear(feats, feats)
        self.out = nn.Linear(feats, feats)

    def forward(self, patches):
        b, n, f = patches.size()
        q = self.to_q(patches).view(b, n, self.n_head, self.feats // self.n_head).transpose(1, 2)
        k = self.to_k(patches).view(b, n, self.n_head, self.feats // self.n_head).transpose(1, 2)
        v = self.to_v(patches).view(b, n, self.n_head, self.feats // self.n_head).transpose(1, 2)
        weights = torch.softmax(torch.einsum("bhif,bhjf->bhij", q, k) / self.root, dim=-1)
        mixed = torch.einsum("bhij,bhjf->bihf", weights, v)
        return self.out(mixed.flatten(2))
