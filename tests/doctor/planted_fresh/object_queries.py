"""Detection with object queries over the pixels of padded pictures."""

import torch
import torch.nn.functional as F
from torch import nn


def with_pos_embed(tensor, pos):
    return tensor if pos is None else tensor + pos


class EncoderLayer(nn.Module):
    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, src, pos=None, src_key_padding_mask=None):
        q = k = with_pos_embed(src, pos)
        src2 = self.self_attn(q, k, value=src, key_padding_mask=src_key_padding_mask, need_weights=False)[0]
        return self.norm(src + src2)


class QueryAttention(nn.Module):
    """Attention of object queries, by hand, for its maps."""

    def __init__(self, d_model=32, nhead=4, dropout=0.1):
        super().__init__()
        self.nhead, self.p = nhead, dropout
        self.q, self.kv = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model)
        self.maps = None

    def forward(self, tgt, memory, memory_key_padding_mask=None):
        b, n, c = tgt.shape
        q = self.q(tgt).view(b, n, self.nhead, -1).transpose(1, 2)
        k, v = self.kv(memory).view(b, memory.size(1), 2, self.nhead, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) * (c // self.nhead) ** -0.5
        if memory_key_padding_mask is not None:
            logits = logits.masked_fill(memory_key_padding_mask[:, None, None, :], float("-inf"))
        self.maps = F.dropout(logits.softmax(-1), self.p)
        return (self.maps @ v).transpose(1, 2).reshape(b, n, c)


class Detector(nn.Module):
    def __init__(self, d_model=32, queries=10, classes=5):
        super().__init__()
        self.encoder = EncoderLayer(d_model)
        self.query_embed = nn.Embedding(queries, d_model)
        self.attend = QueryAttention(d_model)
        self.classify = nn.Linear(d_model, classes)

    def forward(self, features, mask, pos):
        """mask: True at pixels that are padding."""
        memory = self.encoder(features, pos, src_key_padding_mask=torch.logical_not(mask))
        tgt = self.query_embed.weight[None].expand(features.size(0), -1, -1)
        return self.classify(self.attend(tgt, memory, mask))
