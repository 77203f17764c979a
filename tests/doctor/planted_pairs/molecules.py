"""An encoder of molecules that are written as strings of atoms."""

import torch
from torch import nn


class MoleculeEncoder(nn.Module):
    def __init__(self, vocab, embed_dim=128, nhead=4, latent=32, pad_idx=0, longest=120):
        super().__init__()
        self.pad_idx = pad_idx
        self.embedding = nn.Embedding(vocab, embed_dim, padding_idx=pad_idx)
        self.position = nn.Parameter(torch.zeros(1, longest, embed_dim))
        layer = nn.TransformerEncoderLayer(d_model=embed_dim, nhead=nhead, dim_feedforward=512)
        self.encoder = nn.TransformerEncoder(layer, num_layers=3)
        self.to_latent = nn.Linear(embed_dim, 2 * latent)

    def forward(self, smiles):
        """smiles (batch, atoms)."""
        x = self.embedding(smiles) + self.position[:, : smiles.shape[1]]
        x = self.encoder(x)
        mean, log_variance = self.to_latent(x[:, 0]).chunk(2, dim=-1)
        return mean, log_variance
