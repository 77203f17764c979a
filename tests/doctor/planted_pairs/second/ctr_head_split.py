import torch
from torch import nn


class FieldInteraction(nn.Module):
    """Self-attention between the feature fields of a click-through model."""

    def __init__(self, input_dim=40, attention_dim=16, num_heads=2, dropout_rate=0.1, use_residual=True):
        super().__init__()
        self.attention_dim = attention_dim
        self.num_heads = num_heads
        self.output_dim = attention_dim * num_heads
        self.scale = attention_dim ** 0.5
        self.W_q = nn.Linear(input_dim, self.output_dim, bias=False)
        self.W_k = nn.Linear(input_dim, self.output_dim, bias=False)
        self.W_v = nn.Linear(input_dim, self.output_dim, bias=False)
        self.W_res = nn.Linear(input_dim, self.output_dim, bias=False) if use_residual else None
        self.dropout = nn.Dropout(dropout_rate)

    def split_heads(self, x):
        batch_size, num_fields = x.size(0), x.size(1)
        return x.view(batch_size * self.num_heads, num_fields, self.attention_dim)

    def forward(self, fields):
        batch_size = fields.size(0)
        query = self.split_heads(self.W_q(fields))
        key = self.split_heads(self.W_k(fields))
        value = self.split_heads(self.W_v(fields))
        scores = torch.bmm(query, key.transpose(1, 2)) / self.scale
        attention = self.dropout(scores.softmax(dim=-1))
        output = torch.bmm(attention, value)
        output = output.view(batch_size, self.num_heads, -1, self.attention_dim)
        output = output.transpose(1, 2).reshape(batch_size, -1, self.output_dim)
        if self.W_res is not None:
            output = output + self.W_res(fields)
        return output.relu()
