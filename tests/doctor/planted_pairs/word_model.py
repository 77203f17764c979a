"""A word model that predicts the next word at each place."""

import math

import torch
import torch.nn as nn


class WordModel(nn.Module):
    def __init__(self, words, width=200, heads=2, layers=2, longest=512):
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(words, width)
        self.places = nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.to_words = nn.Linear(width, words)

    def forward(self, text):
        places = torch.arange(text.size(1), device=text.device)
        x = self.embed(text) * math.sqrt(self.width) + self.places(places)
        return self.to_words(self.encoder(x))


def train_step(model, optimizer, batch):
    text, target = batch[:, :-1], batch[:, 1:]
    logits = model(text)
    loss = nn.functional.cross_entropy(logits.reshape(-1, logits.size(-1)), target.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
