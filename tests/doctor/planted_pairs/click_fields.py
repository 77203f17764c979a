"""Fields of a click that attend to one another."""

import torch
from torch import nn


class FieldAttention(nn.Module):
    def __init__(self, input_dim, attention_dim=8, num_heads=2):
        super().__init__()
        self.attention_dim, self.num_heads = attention_dim, num_heads
        self.W_q = nn.Linear(input_dim, attention_dim * num_heads, bias=False)
        self.W_k = nn.Linear(input_dim, attention_dim * num_heads, bias=False)
        self.W_v = nn.Linear(input_dim, attention_dim * num_heads, bias=False)
        self.out = nn.Linear(attention_dim * num_heads, input_dim)

    def forward(self, fields):
        batch_size, n_fields, _ = fields.shape
        query, key, value = self.W_q(fields), self.W_k(fields), self.W_v(fields)
        query = query.view(batch_size * self.num_heads, -1, self.attention_dim)
        key = key.view(batch_size * self.num_heads, -1, self.attention_dim)
        value = value.view(batch_size * self.num_heads, -1, self.attention_dim)
        weights = torch.softmax(torch.bmm(query, key.transpose(1, 2)) / self.attention_dim**0.5, dim=2)
        output = torch.bmm(weights, value)
        return self.out(output.view(batch_size, -1, self.num_heads * self.attention_dim))
