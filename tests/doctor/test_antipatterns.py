"""The mistakes that everyone teaches, each found in code as students write it: one file per lesson, from many hands."""

import textwrap

import pytest

from regard.doctor import RuleSelection, Severity, diagnose

EVERYTHING, MISTAKES = RuleSelection(), RuleSelection(least=Severity.WARNING)

LESSONS = {
    "no square root of d, first homework": (
        "ATT101",
        """
        import torch
        import torch.nn as nn
        import torch.nn.functional as F

        class SelfAttention(nn.Module):
            def __init__(self, embed_size):
                super(SelfAttention, self).__init__()
                self.W_Q = nn.Linear(embed_size, embed_size)
                self.W_K = nn.Linear(embed_size, embed_size)
                self.W_V = nn.Linear(embed_size, embed_size)

            def forward(self, X):
                Q = self.W_Q(X)
                K = self.W_K(X)
                V = self.W_V(X)
                # similarity of each word with each word
                A = torch.bmm(Q, K.permute(0, 2, 1))
                A = F.softmax(A, dim=2)
                return torch.bmm(A, V)
        """,
    ),
    "no square root of d, in one cell": (
        "ATT101",
        """
        import torch
        x = torch.randn(1, 10, 64)
        Wq, Wk, Wv = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64, 64)

        def attention(query, key, value):
            energy = torch.einsum("bqd,bkd->bqk", query, key)
            return torch.einsum("bqk,bkd->bqd", torch.softmax(energy, dim=-1), value)

        out = attention(x @ Wq, x @ Wk, x @ Wv)
        """,
    ),
    "no causal mask, a small GPT": (
        "ATT233",
        """
        import torch
        from torch import nn

        class MiniGPT(nn.Module):
            def __init__(self, vocab_size=65, n_embd=128, block_size=64):
                super().__init__()
                self.wte = nn.Embedding(vocab_size, n_embd)
                self.wpe = nn.Embedding(block_size, n_embd)
                layer = nn.TransformerEncoderLayer(d_model=n_embd, nhead=4, batch_first=True)
                self.blocks = nn.TransformerEncoder(layer, num_layers=4)
                self.lm_head = nn.Linear(n_embd, vocab_size)

            def forward(self, idx):
                pos = torch.arange(idx.shape[1], device=idx.device)
                return self.lm_head(self.blocks(self.wte(idx) + self.wpe(pos)))

        def step(model, batch, opt):
            x, y = batch[:, :-1], batch[:, 1:]
            loss = nn.functional.cross_entropy(model(x).transpose(1, 2), y)
            loss.backward()
            opt.step()
        """,
    ),
    "no causal mask, a class of that name": (
        "ATT231",
        """
        import math
        import torch
        from torch import nn

        class MaskedMultiHeadAttention(nn.Module):
            def __init__(self, d_model, num_heads):
                super().__init__()
                self.num_heads, self.d_k = num_heads, d_model // num_heads
                self.q = nn.Linear(d_model, d_model)
                self.k = nn.Linear(d_model, d_model)
                self.v = nn.Linear(d_model, d_model)

            def forward(self, x):
                B, T, C = x.shape
                q = self.q(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
                k = self.k(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
                v = self.v(x).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
                weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
                return (weights @ v).transpose(1, 2).reshape(B, T, C), weights
        """,
    ),
    "a Python loop over the words": (
        "ATT601",
        """
        import numpy as np
        import torch

        def self_attention(X, Wq, Wk, Wv):
            Q, K, V = X @ Wq, X @ Wk, X @ Wv
            n, d = Q.shape
            scores = torch.zeros(n, n)
            for i in range(n):
                for j in range(n):
                    scores[i, j] = torch.dot(Q[i], K[j]) / np.sqrt(d)
            return torch.softmax(scores, dim=1) @ V
        """,
    ),
    "a Python loop over the heads": (
        "ATT601",
        """
        import math
        import torch
        from torch import nn

        class Head(nn.Module):
            def __init__(self, d_model, d_k):
                super().__init__()
                self.q, self.k, self.v = nn.Linear(d_model, d_k), nn.Linear(d_model, d_k), nn.Linear(d_model, d_k)

            def forward(self, x):
                s = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(self.q.out_features)
                return torch.softmax(s, dim=-1) @ self.v(x)

        class MultiHead(nn.Module):
            def __init__(self, d_model, n_heads):
                super().__init__()
                self.heads = nn.ModuleList([Head(d_model, d_model // n_heads) for _ in range(n_heads)])

            def forward(self, x):
                return torch.cat([head(x) for head in self.heads], dim=-1)
        """,
    ),
    "no cache": (
        "ATT511",
        """
        import torch
        from torch.nn import functional as F

        @torch.no_grad()
        def generate(model, idx, max_new_tokens, temperature=1.0):
            for _ in range(max_new_tokens):
                logits = model(idx)
                logits = logits[:, -1, :] / temperature
                probs = F.softmax(logits, dim=-1)
                idx_next = torch.multinomial(probs, num_samples=1)
                idx = torch.cat((idx, idx_next), dim=1)
            return idx
        """,
    ),
    "no cache, greedy": (
        "ATT511",
        """
        import torch

        def translate(model, src, sos, eos, max_len=50):
            ys = torch.ones(1, 1).fill_(sos).long()
            memory = model.encode(src)
            for i in range(max_len - 1):
                out = model.decode(memory, ys)
                next_word = model.generator(out[:, -1]).argmax(dim=1).item()
                ys = torch.cat([ys, torch.ones(1, 1).long().fill_(next_word)], dim=1)
                if next_word == eos:
                    break
            return ys
        """,
    ),
    "memory of n², 100,000 positions in a buffer": (
        "ATT606",
        """
        import math
        import torch
        import torch.nn as nn

        class CausalAttention(nn.Module):
            def __init__(self, d_in, d_out, context_length=100_000, dropout=0.1):
                super().__init__()
                self.W_query, self.W_key = nn.Linear(d_in, d_out), nn.Linear(d_in, d_out)
                self.W_value = nn.Linear(d_in, d_out)
                self.dropout = nn.Dropout(dropout)
                self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

            def forward(self, x):
                b, num_tokens, d_in = x.shape
                keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
                attn_scores = queries @ keys.transpose(1, 2)
                attn_scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
                attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
                return attn_weights @ values
        """,
    ),
    "memory of n², a mask for the fused kernel": (
        "ATT603",
        """
        import torch
        import torch.nn.functional as F

        def attend(q, k, v):
            T = q.size(-2)
            mask = torch.tril(torch.ones(T, T, device=q.device)).bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        """,
    ),
    "no positions": (
        "ATT504",
        """
        import torch
        import torch.nn as nn

        class SentimentTransformer(nn.Module):
            def __init__(self, vocab_size, d_model=128, nhead=8, num_classes=2):
                super().__init__()
                self.embedding = nn.Embedding(vocab_size, d_model)
                self.encoder = nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(d_model, nhead, batch_first=True), num_layers=2
                )
                self.fc = nn.Linear(d_model, num_classes)

            def forward(self, text):
                x = self.embedding(text)
                x = self.encoder(x)
                return self.fc(x.mean(dim=1))
        """,
    ),
}


OF_A_MODEL_ELSEWHERE = ("no cache", "no cache, greedy")
"""Lessons whose function is given a model that the file does not show: they are found as hints."""


@pytest.mark.parametrize("name", LESSONS)
def test_the_lesson_is_found(name: str) -> None:
    code, source = LESSONS[name]
    selection = EVERYTHING if name in OF_A_MODEL_ELSEWHERE else MISTAKES
    assert code in [one.code for one in diagnose(textwrap.dedent(source), selection=selection)]
