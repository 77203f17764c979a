"""A bidirectional encoder, its classifier and its trainer."""

import torch
from torch import nn
from torch.nn import functional as F


class EncoderAttention(nn.Module):
    def __init__(self, hidden=48, heads=4, dropout=0.1):
        super().__init__()
        self.heads, self.size, self.dropout = heads, hidden // heads, dropout
        self.query, self.key, self.value, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.norm = nn.LayerNorm(hidden)

    def by_heads(self, x):
        return x.view(x.size(0), -1, self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x, attention_mask=None):
        """attention_mask (batch, length): 1 for tokens, 0 for padding."""
        keep = None if attention_mask is None else attention_mask[:, None, None, :].to(torch.bool)
        y = F.scaled_dot_product_attention(
            self.by_heads(self.query(x)),
            self.by_heads(self.key(x)),
            self.by_heads(self.value(x)),
            attn_mask=keep,
            dropout_p=self.dropout * self.training,
        )
        return self.norm(x + self.dense(y.permute(0, 2, 1, 3).flatten(2)))


class ManualEncoderAttention(EncoderAttention):
    def forward(self, x, attention_mask=None):
        q, k, v = self.by_heads(self.query(x)), self.by_heads(self.key(x)), self.by_heads(self.value(x))
        scores = torch.einsum("bhid,bhjd->bhij", q, k).div(self.size**0.5)
        if attention_mask is not None:
            scores += (1.0 - attention_mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
        weights = nn.Softmax(dim=-1)(scores)
        weights = F.dropout(weights, p=self.dropout, training=self.training)
        y = torch.einsum("bhij,bhjd->bhid", weights, v)
        return self.norm(x + self.dense(y.permute(0, 2, 1, 3).reshape(x.shape)))


class Encoder(nn.Module):
    def __init__(self, vocabulary=200, hidden=48, layers=2, attention=EncoderAttention):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(128, hidden)
        self.layers = nn.ModuleList([attention(hidden) for _ in range(layers)])

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


class AttentivePooling(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x, attention_mask):
        scores = self.score(x).squeeze(-1).masked_fill(attention_mask == 0, float("-inf"))
        return torch.bmm(scores.softmax(dim=1).unsqueeze(1), x).squeeze(1)


class Classifier(nn.Module):
    def __init__(self, classes=3, attention=EncoderAttention):
        super().__init__()
        self.encoder = Encoder(attention=attention)
        self.pool = AttentivePooling()
        self.dropout = nn.Dropout(0.1)
        self.out = nn.Linear(48, classes)

    def forward(self, input_ids, attention_mask):
        return self.out(self.dropout(self.pool(self.encoder(input_ids, attention_mask), attention_mask)))


def train_epoch(model, batches, optimizer):
    model.train()
    for batch in batches:
        loss = F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model, batches):
    model.eval()
    hits = [(model(b["input_ids"], b["attention_mask"]).argmax(-1) == b["labels"]).float() for b in batches]
    return torch.cat(hits).mean().item()
