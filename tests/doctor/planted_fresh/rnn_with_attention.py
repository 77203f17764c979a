"""Homework: translate with recurrent networks and additive attention."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, input_dim=50, emb_dim=16, hid_dim=24):
        super().__init__()
        self.embedding = nn.Embedding(input_dim, emb_dim)
        self.rnn = nn.GRU(emb_dim, hid_dim, batch_first=True)

    def forward(self, src):
        outputs, hidden = self.rnn(self.embedding(src))
        return outputs, hidden[-1]


class Attention(nn.Module):
    def __init__(self, hid_dim=24):
        super().__init__()
        self.attn = nn.Linear(2 * hid_dim, hid_dim)
        self.v = nn.Linear(hid_dim, 1, bias=False)

    def forward(self, hidden, encoder_outputs):
        # hidden: [batch, hid], encoder_outputs: [batch, src len, hid]
        src_len = encoder_outputs.shape[1]
        hidden = hidden.unsqueeze(1).repeat(1, src_len, 1)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs), dim=2)))
        attention = self.v(energy).squeeze(2)
        return F.softmax(attention, dim=0)


class DotAttention(nn.Module):
    """Luong's score, with the padding of the source left out."""

    def forward(self, hidden, encoder_outputs, mask):
        scores = torch.bmm(encoder_outputs, hidden.unsqueeze(2)).squeeze(2)
        weights = F.softmax(scores, dim=1)
        return weights


class Decoder(nn.Module):
    def __init__(self, output_dim=50, emb_dim=16, hid_dim=24, luong=False):
        super().__init__()
        self.embedding = nn.Embedding(output_dim, emb_dim)
        self.attention = DotAttention() if luong else Attention(hid_dim)
        self.luong = luong
        self.rnn = nn.GRUCell(emb_dim + hid_dim, hid_dim)
        self.fc_out = nn.Linear(hid_dim, output_dim)

    def forward(self, token, hidden, encoder_outputs, mask):
        if self.luong:
            a = self.attention(hidden, encoder_outputs, mask)
        else:
            a = self.attention(hidden, encoder_outputs)
        weighted = torch.bmm(a.unsqueeze(1), encoder_outputs).squeeze(1)
        hidden = self.rnn(torch.cat((self.embedding(token), weighted), dim=1), hidden)
        return self.fc_out(hidden), hidden


class Seq2Seq(nn.Module):
    def __init__(self, src_pad_idx=0, luong=False):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder(luong=luong)
        self.src_pad_idx = src_pad_idx

    def forward(self, src, trg):
        encoder_outputs, hidden = self.encoder(src)
        mask = src != self.src_pad_idx
        outputs = []
        for t in range(trg.shape[1]):
            output, hidden = self.decoder(trg[:, t], hidden, encoder_outputs, mask)
            outputs.append(output)
        return torch.stack(outputs, dim=1)
