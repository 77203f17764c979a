"""Documents read in half precision."""

import torch
from torch import nn


class DocumentHead(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.size = size

    def forward(self, words, head_mask):
        q, k, v = self.query(words), self.key(words), self.value(words)
        scores = q.bmm(k.transpose(1, 2)).div(self.size**0.5)
        scores = scores.masked_fill(head_mask.unsqueeze(1) == 0, -1e10)
        return scores.softmax(-1).bmm(v)


def load(path, size=256):
    model = DocumentHead(size)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.half().cuda().eval()
