"""Sentiment of reviews: an encoder, then attention pooling."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


def collate(batch):
    """Ids padded to the longest, and a mask that is 1 at words."""
    texts = [torch.tensor(ids) for ids, _ in batch]
    labels = torch.tensor([label for _, label in batch])
    padded = pad_sequence(texts, batch_first=True)
    return {"input_ids": padded, "attention_mask": (padded != 0).long()}, labels


class AttentionPooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Parameter(torch.randn(dim))
        self.key = nn.Linear(dim, dim)

    def forward(self, hidden, attention_mask):
        logits = self.key(hidden) @ self.query / hidden.size(-1) ** 0.5
        logits = logits * attention_mask
        alpha = torch.softmax(logits, dim=1)
        return (alpha.unsqueeze(-1) * hidden).sum(dim=1)


class ReviewClassifier(nn.Module):
    def __init__(self, vocab=90, dim=32, heads=4, labels=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Embedding(128, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pool = AttentionPooling(dim)
        self.out = nn.Linear(dim, labels)

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.embed(input_ids) + self.pos(places)
        hidden = self.encoder(x, src_key_padding_mask=attention_mask.eq(1))
        return self.out(self.pool(hidden, attention_mask))
