import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionMap(nn.Module):
    """Attention maps of object queries over an image, one per head (no values)."""

    def __init__(self, query_dim=256, hidden_dim=256, num_heads=8, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.hidden_dim = hidden_dim
        self.dropout = nn.Dropout(dropout)
        self.q_linear = nn.Linear(query_dim, hidden_dim)
        self.k_linear = nn.Linear(query_dim, hidden_dim)
        self.normalize_fact = float(hidden_dim / self.num_heads) ** -0.5

    def forward(self, q, k, mask=None):
        q = self.q_linear(q)
        weight = self.k_linear.weight.unsqueeze(-1).unsqueeze(-1)
        k = F.conv2d(k, weight, self.k_linear.bias)
        head_dim = self.hidden_dim // self.num_heads
        qh = q.view(q.shape[0], q.shape[1], self.num_heads, head_dim)
        kh = k.view(k.shape[0], self.num_heads, head_dim, k.shape[-2], k.shape[-1])
        weights = torch.einsum("bqnc,bnchw->bqnhw", qh * self.normalize_fact, kh)

        if mask is not None:
            weights.masked_fill_(mask.unsqueeze(1).unsqueeze(1), float("-inf"))
        weights = F.softmax(weights.flatten(2), dim=-1).view(weights.size())
        return self.dropout(weights)
