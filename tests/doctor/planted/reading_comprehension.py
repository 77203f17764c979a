"""BiDAF-like reader: question and passage attend to each other."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VERY_NEGATIVE = -1e30


def masked_softmax(logits, mask, dim=-1):
    mask = mask.type(torch.float32)
    return F.softmax(mask * logits + (1 - mask) * VERY_NEGATIVE, dim)


class BiAttention(nn.Module):
    def __init__(self, hidden, drop_prob=0.1):
        super().__init__()
        self.drop_prob = drop_prob
        self.c_weight = nn.Parameter(torch.randn(hidden, 1) * 0.1)
        self.q_weight = nn.Parameter(torch.randn(hidden, 1) * 0.1)
        self.cq_weight = nn.Parameter(torch.randn(1, 1, hidden) * 0.1)

    def similarity(self, c, q):
        c = F.dropout(c, self.drop_prob)
        s0 = torch.matmul(c, self.c_weight)
        s1 = torch.matmul(q, self.q_weight).transpose(1, 2)
        return s0 + s1 + torch.matmul(c * self.cq_weight, q.transpose(1, 2))

    def forward(self, c, q, c_mask, q_mask):
        s = self.similarity(c, q)
        s1 = masked_softmax(s, q_mask[:, None, :], dim=2)
        s2 = masked_softmax(s, c_mask[:, :, None], dim=1)
        a = torch.bmm(s1, q)
        b = torch.bmm(torch.bmm(s1, s2.transpose(1, 2)), c)
        return torch.cat([c, a, c * a, c * b], dim=2)


class SelfMatching(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.w = nn.Linear(hidden, hidden, bias=False)
        self.hidden = hidden

    def forward(self, x, mask):
        scores = torch.bmm(self.w(x), self.w(x).transpose(1, 2)) / self.hidden**0.5
        scores = scores.masked_fill(mask[:, :, None] == 0, VERY_NEGATIVE)
        return torch.bmm(F.softmax(scores, dim=2), x)


class AnswerPointer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.start, self.end = nn.Linear(hidden, 1), nn.Linear(hidden, 1)

    def forward(self, x, mask):
        start, end = self.start(x), self.end(x)  # (batch, length, 1)
        p_start = F.softmax(start, dim=-1)
        p_end = masked_softmax(end.squeeze(-1), mask)
        return p_start.squeeze(-1), p_end


class Reader(nn.Module):
    def __init__(self, vocab=200, hidden=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden // 2, bidirectional=True, batch_first=True)
        self.att = BiAttention(hidden)
        self.mix = nn.Linear(4 * hidden, hidden)
        self.match = SelfMatching(hidden)
        self.pointer = AnswerPointer(hidden)

    def forward(self, passage, question):
        c_mask, q_mask = passage != 0, question != 0
        c, q = self.rnn(self.emb(passage))[0], self.rnn(self.emb(question))[0]
        x = self.match(self.mix(self.att(c, q, c_mask, q_mask)), c_mask)
        return self.pointer(x, c_mask)
