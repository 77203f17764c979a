import torch
import torch.nn as nn
import torch.nn.functional as F


class LabelAttentionClassifier(nn.Module):
    """One learned query per label attends over the tokens of a text."""

    def __init__(self, vocab_size=4000, dim=96, n_labels=12, n_head=4, pad_id=0):
        super().__init__()
        self.pad_id = pad_id
        self.n_head = n_head
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=pad_id)
        self.labels = nn.Parameter(torch.randn(n_labels, dim) * 0.02)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, 1)

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.n_head, d // self.n_head).transpose(1, 2)

    def forward(self, tokens):
        b = tokens.size(0)
        text = self.embed(tokens)
        queries = self.labels.unsqueeze(0).expand(b, -1, -1)
        q = self.split(self.q_proj(queries))
        k = self.split(self.k_proj(text))
        v = self.split(self.v_proj(text))

        attn_mask = (tokens == self.pad_id)[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)

        out = out.transpose(1, 2).reshape(b, queries.size(1), -1)
        return self.head(out).squeeze(-1)
