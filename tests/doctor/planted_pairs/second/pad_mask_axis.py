import math

from torch import nn


class ScaleDotProductAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q, k, v, mask=None):
        d = k.size(-1)
        score = (q @ k.transpose(2, 3)) / math.sqrt(d)
        if mask is not None:
            score = score.masked_fill(mask == 0, -10000)
        score = self.softmax(score)
        return score @ v, score


class Encoder(nn.Module):
    def __init__(self, voc_size=1000, d_model=64, n_head=8, src_pad_idx=1):
        super().__init__()
        self.src_pad_idx = src_pad_idx
        self.n_head = n_head
        self.emb = nn.Embedding(voc_size, d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        self.attention = ScaleDotProductAttention()

    def make_src_mask(self, src):
        src_mask = (src != self.src_pad_idx).unsqueeze(1).unsqueeze(3)
        return src_mask

    def forward(self, src):
        x = self.emb(src)
        b, n, d = x.size()
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(b, n, self.n_head, -1).transpose(1, 2)
        k = k.view(b, n, self.n_head, -1).transpose(1, 2)
        v = v.view(b, n, self.n_head, -1).transpose(1, 2)
        y, _ = self.attention(q, k, v, mask=self.make_src_mask(src))
        y = y.transpose(1, 2).contiguous().view(b, n, d)
        return x + self.out(y)
