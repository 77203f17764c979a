"""Linear biases for a compiled attention."""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

flex = torch.compile(flex_attention)


def make_score_mod(n_heads):
    slopes = torch.exp2(-8.0 * torch.arange(1, n_heads + 1) / n_heads)

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (q_idx - kv_idx)

    return alibi


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


class Biased(torch.nn.Module):
    def __init__(self, n_heads, length):
        super().__init__()
        self.score_mod = make_score_mod(n_heads)
        self.block_mask = create_block_mask(causal, None, None, length, length, device="cpu")

    def forward(self, q, k, v):
        return flex(q, k, v, score_mod=self.score_mod, block_mask=self.block_mask)
