"""Sequential recommendation: what does the user click next?"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class PointWiseFeedForward(nn.Module):
    def __init__(self, hidden_units, dropout_rate):
        super().__init__()
        self.conv1 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)
        self.dropout1 = nn.Dropout(p=dropout_rate)
        self.conv2 = nn.Conv1d(hidden_units, hidden_units, kernel_size=1)

    def forward(self, inputs):
        return self.conv2(F.relu(self.dropout1(self.conv1(inputs.transpose(-1, -2))))).transpose(-1, -2) + inputs


class NextClick(nn.Module):
    def __init__(self, items=500, hidden=32, maxlen=50, blocks=2, dropout=0.2):
        super().__init__()
        self.item_emb = nn.Embedding(items + 1, hidden, padding_idx=0)
        self.pos_emb = nn.Embedding(maxlen, hidden)
        self.attention_layers = nn.ModuleList([nn.MultiheadAttention(hidden, 2, dropout, batch_first=True) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(hidden) for _ in range(blocks)])
        self.forward_layers = nn.ModuleList([PointWiseFeedForward(hidden, dropout) for _ in range(blocks)])

    def log2feats(self, log_seqs):
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        seqs = seqs + self.pos_emb(torch.arange(log_seqs.shape[1], device=log_seqs.device))
        timeline_mask = log_seqs == 0
        tl = seqs.shape[1]
        attention_mask = torch.tril(torch.ones((tl, tl), dtype=torch.bool, device=seqs.device))
        for attention, norm, feed in zip(self.attention_layers, self.norms, self.forward_layers, strict=True):
            q = norm(seqs)
            y, _ = attention(q, seqs, seqs, attn_mask=attention_mask, need_weights=False)
            seqs = feed(q + y) * ~timeline_mask.unsqueeze(-1)
        return seqs

    def forward(self, log_seqs, pos_seqs, neg_seqs):
        feats = self.log2feats(log_seqs)
        return (feats * self.item_emb(pos_seqs)).sum(-1), (feats * self.item_emb(neg_seqs)).sum(-1)


class TargetAttention(nn.Module):
    """The candidate reads the history."""

    def __init__(self, dim=32):
        super().__init__()
        self.hidden = nn.Linear(3 * dim, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, candidate, history, mask):
        c = candidate[:, None].expand_as(history)
        scores = self.score(torch.tanh(self.hidden(torch.cat([c, history, c * history], -1)))).squeeze(-1)
        scores = torch.where(mask, scores, -100.0)
        return torch.einsum("bn,bnd->bd", scores.softmax(dim=-1), history)


class BasketAttention(nn.Module):
    def __init__(self, dim=32, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, present):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = present[:, None, None, :].to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


def sample_batch(rng: np.random.Generator, size=4, maxlen=50, items=500):
    draw = lambda: torch.from_numpy(rng.integers(1, items, (size, maxlen)))  # noqa: E731
    return draw(), draw(), draw()
