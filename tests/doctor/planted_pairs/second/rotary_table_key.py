import torch
from torch import nn


class Rotary(nn.Module):
    """Rotary positions with a table that is computed once for each length."""

    def __init__(self, dim, theta=10000.0):
        super().__init__()
        self.freqs = nn.Parameter(theta ** (-torch.arange(0, dim, 2).float() / dim), requires_grad=False)
        self.tables = {}

    def table(self, seq_len, offset, device):
        key = seq_len
        if key not in self.tables:
            pos = torch.arange(offset, offset + seq_len, device=device)
            angles = torch.einsum("i,j->ij", pos.float(), self.freqs)
            self.tables[key] = torch.repeat_interleave(angles, 2, dim=-1)
        return self.tables[key]

    def rotate_pairs(self, x):
        x = x.unflatten(-1, (-1, 2))
        a, b = x.unbind(-1)
        return torch.stack((-b, a), dim=-1).flatten(-2)

    def forward(self, t, offset=0):
        angles = self.table(t.shape[-2], offset, t.device)
        return t * angles.cos() + self.rotate_pairs(t) * angles.sin()


@torch.no_grad()
def decode(attend, rotary, wq, wk, wv, embed, prompt, steps):
    q, k, v = wq(embed(prompt)), wk(embed(prompt)), wv(embed(prompt))
    keys, values = rotary(k), v
    out = attend(rotary(q), keys, values)[:, -1:]
    for _ in range(steps):
        past = keys.shape[-2]
        keys = torch.cat([keys, rotary(wk(out), offset=past)], dim=-2)
        values = torch.cat([values, wv(out)], dim=-2)
        out = attend(rotary(wq(out), offset=past), keys, values)
    return out
