"""A sequence of states as one vector: a learned weight for each step."""

import torch
from torch import nn


class StatePooling(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(features, features // 2), nn.Tanh(), nn.Linear(features // 2, 1))

    def forward(self, states):
        """States (batch, steps, features)."""
        weights = torch.softmax(self.score(states), dim=2)
        return (weights * states).sum(dim=1)
