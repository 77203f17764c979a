import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, kv_dim=48, q_dim=64, qk_out_dim=32, v_out_dim=64, output_dim=64, num_heads=4, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qk_head_dim = qk_out_dim // num_heads
        self.v_head_dim = v_out_dim // num_heads
        self.k = nn.Linear(kv_dim, qk_out_dim)
        self.q = nn.Linear(q_dim, qk_out_dim)
        self.v = nn.Linear(kv_dim, v_out_dim)
        self.projection = nn.Linear(v_out_dim, output_dim)
        self.dropout = nn.Dropout(dropout)
        self.scale = self.qk_head_dim ** -0.5

    def transform_for_scores(self, x, head_dim):
        new_shape = x.size()[:-1] + (self.num_heads, head_dim)
        return x.reshape(*new_shape).transpose(-2, -3)

    def forward(self, inputs_kv, inputs_q, attention_mask=None):
        keys, queries, values = self.k(inputs_kv), self.q(inputs_q), self.v(inputs_kv)
        keys = self.transform_for_scores(keys, self.qk_head_dim)
        queries = self.transform_for_scores(queries, self.qk_head_dim)
        values = self.transform_for_scores(values, self.v_head_dim)
        attention = queries @ keys.transpose(-2, -1) / self.scale
        if attention_mask is not None:
            min_value = torch.finfo(attention.dtype).min
            attention.masked_fill_(attention_mask[:, None, None, :] == 0, min_value)
        attention = self.dropout(attention.softmax(dim=-1))
        weighted = (attention @ values).transpose(1, 2).contiguous()
        weighted = weighted.view(weighted.size(0), weighted.size(1), -1)
        return self.projection(weighted)
