"""A sentence encoder over torch's own layers, with its data and training loop."""

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class Encoder(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, labels):
        super(Encoder, self).__init__()
        self.table = nn.Embedding(vocab_size, width, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu")
        self.stack = nn.TransformerEncoder(layer, layers)
        self.classify = nn.Linear(width, labels)

    def forward(self, token_ids):
        """token_ids: (batch, length)"""
        padding = token_ids == PAD
        hidden = self.stack(self.table(token_ids), src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        return self.classify((hidden * kept).sum(1) / kept.sum(1))


class PairEncoder(nn.Module):
    """One text reads another."""

    def __init__(self, vocab_size, width, heads, longest=512):
        super(PairEncoder, self).__init__()
        self.table = nn.Embedding(vocab_size, width, padding_idx=PAD)
        self.places = nn.Embedding(longest, width)
        self.read = nn.MultiheadAttention(width, heads, batch_first=True)
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def embed(self, ids):
        return self.table(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))

    def forward(self, left, right):
        x, y = self.embed(left), self.embed(right)
        attention_mask = (left != PAD).long()
        x = x + self.inner(x, x, x, key_padding_mask=attention_mask.bool(), need_weights=False)[0]
        out, _ = self.read(x, y, y, key_padding_mask=(right == PAD))
        return out


class Generator(nn.Module):
    """Continues a text."""

    def __init__(self, vocab_size, width, heads, layers, longest):
        super(Generator, self).__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.places = nn.Parameter(torch.zeros(1, longest, width))
        layer = nn.TransformerEncoderLayer(width, heads, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, ids):
        x = self.table(ids) + self.places[:, : ids.shape[1]]
        return self.head(self.stack(x))


def train(model, batches, optimizer):
    model.train()
    for batch in batches:
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
