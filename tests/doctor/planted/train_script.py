#!/usr/bin/env python
import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--steps", type=int, default=5)


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd, head_size, dropout=0.2):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * C**-0.5
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        wei = wei.masked_fill(future, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class Bigger(nn.Module):
    def __init__(self, vocab, n_embd, num_heads, block_size):
        super().__init__()
        self.tok = nn.Embedding(vocab, n_embd)
        self.pos = nn.Embedding(block_size, n_embd)
        self.attn = MultiHead(n_embd, num_heads)
        self.attn2 = FastHead(n_embd, num_heads)
        self.lm_head = nn.Linear(n_embd, vocab)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1], device=idx.device))
        x = x + self.attn(x)
        x = x + self.attn2(x)
        return self.lm_head(x)


class FastHead(nn.Module):
    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.n = num_heads
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n, C // self.n).transpose(1, 2) for t in (q, k, v))
        mask = torch.tril(torch.ones(T, T, device=x.device)).bool()[None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).contiguous().view(B, T, C)


def evaluate(model, data):
    losses = [F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item() for x, y in data]
    return math.exp(sum(losses) / len(losses))


def main(argv=None):
    args = parser.parse_args(argv)
    model = Bigger(65, args.dim, args.heads, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randint(65, (4, 32)), torch.randint(65, (4, 32))) for _ in range(args.steps)]
    for x, y in batches:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(evaluate(model, batches))


if __name__ == "__main__":
    main()
