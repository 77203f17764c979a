"""Patches of a slide as one vector: gated attention over a bag."""

import torch
from torch import nn


class GatedBag(nn.Module):
    def __init__(self, features, hidden=128):
        super().__init__()
        self.tanh = nn.Sequential(nn.Linear(features, hidden), nn.Tanh())
        self.gate = nn.Sequential(nn.Linear(features, hidden), nn.Sigmoid())
        self.score = nn.Linear(hidden, 1)

    def forward(self, patches, mask):
        """patches (batch, n, features), mask (batch, n) with True for a patch."""
        scores = self.score(self.tanh(patches) * self.gate(patches)).squeeze(-1)
        scores = scores * mask
        weights = torch.softmax(scores, dim=1)
        return torch.bmm(weights.unsqueeze(1), patches).squeeze(1)
