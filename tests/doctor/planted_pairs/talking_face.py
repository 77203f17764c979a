"""Sinusoidal places for frames of a talking face."""

import math

import torch
from torch import nn


class FramePlaces(nn.Module):
    def __init__(self, d_model, max_len=600, dropout=0.1):
        super().__init__()
        place = torch.arange(max_len).unsqueeze(1)
        rate = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model)
        pe[0, :, 0::2] = torch.sin(place * rate)
        pe[0, :, 1::2] = torch.cos(place * rate)
        self.register_buffer("pe", pe)
        self.dropout = nn.Dropout(dropout)

    def forward(self, frames):
        """frames (batch, length, d_model)."""
        frames = frames + self.pe[:, frames.shape[1], :]
        return self.dropout(frames)


class FaceEncoder(nn.Module):
    def __init__(self, d_model=256, heads=4):
        super().__init__()
        self.places = FramePlaces(d_model)
        layer = nn.TransformerEncoderLayer(d_model, heads, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)

    def forward(self, frames, padding):
        return self.layers(self.places(frames), src_key_padding_mask=padding)
