"""Clips of a video that read the words of a question."""

import torch
from torch import nn


class ClipsReadWords(nn.Module):
    def __init__(self, dim=256, nhead=8):
        super().__init__()
        self.nhead = nhead
        self.cross = nn.MultiheadAttention(dim, nhead, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, clips, words, clip_valid, word_valid):
        forbidden = ~(clip_valid.unsqueeze(2) & word_valid.unsqueeze(1))
        forbidden[:, :, 0] = False
        mask = forbidden.repeat(self.nhead, 1, 1)
        seen, _ = self.cross(clips, words, words, attn_mask=mask, need_weights=False)
        return self.norm(clips + seen)
