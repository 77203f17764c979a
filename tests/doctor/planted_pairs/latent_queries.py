"""Latent vectors that read a long input."""

import torch
from torch import nn


class LatentReader(nn.Module):
    def __init__(self, latent_dim, input_dim, qk_dim, n_latents):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(n_latents, latent_dim) * 0.02)
        self.query = nn.Linear(latent_dim, qk_dim)
        self.key = nn.Linear(input_dim, qk_dim)
        self.value = nn.Linear(input_dim, latent_dim)
        self.scale = qk_dim**-0.5

    def forward(self, inputs):
        q = self.query(self.latents).expand(inputs.size(0), -1, -1)
        k, v = self.key(inputs), self.value(inputs)
        similarity = (q @ k.transpose(-2, -1)) / self.scale
        return similarity.softmax(dim=-1) @ v
