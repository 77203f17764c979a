"""Mechanisms that are not softmax(QK^T / sqrt(d))V, and are right."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class SlotAttention(nn.Module):
    """Slots compete for the pixels (Locatello et al. 2020): the softmax runs over the slots, which are the queries."""

    def __init__(self, dim=32, slots=4, iterations=3):
        super().__init__()
        self.iterations, self.scale = iterations, dim**-0.5
        self.slots = nn.Parameter(torch.randn(slots, dim))
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gru = nn.GRUCell(dim, dim)
        self.norm_inputs, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, inputs):
        b, _, d = inputs.shape
        inputs = self.norm_inputs(inputs)
        k, v = self.k(inputs), self.v(inputs)
        slots = self.slots.expand(b, -1, -1)
        for _ in range(self.iterations):
            q = self.q(self.norm_slots(slots))
            dots = torch.einsum("bid,bjd->bij", q, k) * self.scale
            attn = dots.softmax(dim=1) + 1e-8
            attn = attn / attn.sum(dim=-1, keepdim=True)
            updates = torch.einsum("bjd,bij->bid", v, attn)
            slots = self.gru(updates.reshape(-1, d), slots.reshape(-1, d)).view(b, -1, d)
        return slots


class AdditiveAttention(nn.Module):
    """v^T tanh(W q + U k), Bahdanau et al. 2015: not scaled."""

    def __init__(self, query_dim, key_dim, hidden):
        super().__init__()
        self.W, self.U, self.v = nn.Linear(query_dim, hidden), nn.Linear(key_dim, hidden), nn.Linear(hidden, 1)

    def forward(self, query, keys, mask):
        energy = self.v(torch.tanh(self.W(query).unsqueeze(1) + self.U(keys))).squeeze(-1)
        alpha = F.softmax(energy.masked_fill(~mask, float("-inf")), dim=1)
        return torch.bmm(alpha.unsqueeze(1), keys).squeeze(1), alpha


class LuongAttention(nn.Module):
    """Luong et al. 2015, general: q W k without a scale; source first, batch second."""

    def __init__(self, dim):
        super().__init__()
        self.W = nn.Linear(dim, dim, bias=False)

    def forward(self, query, memory):
        scores = torch.einsum("bd,sbd->sb", query, self.W(memory))
        weights = F.softmax(scores, dim=0)
        return torch.einsum("sb,sbd->bd", weights, memory)


class T5Attention(nn.Module):
    """No division: the initial query weights have the scale (Raffel et al. 2020)."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.d_kv = heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(dim * self.d_kv) ** -0.5)
        self.relative_attention_bias = nn.Embedding(32, heads)

    def buckets(self, n, device):
        distance = torch.arange(n, device=device) - torch.arange(n, device=device)[:, None]
        return distance.clamp(-15, 16) + 15

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, self.d_kv).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.relative_attention_bias(self.buckets(n, x.device)).permute(2, 0, 1)
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(b, -1, -1, -1), scale=1.0)
        return self.o(y.transpose(1, 2).reshape(b, n, d))


class LearnedTemperature(nn.Module):
    """Queries and keys of length 1, a temperature for each head (Swin v2)."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.logit_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * self.logit_scale.clamp(max=math.log(100.0)).exp()
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class KeysFirst(nn.Module):
    """Scores as (batch, keys, queries): the softmax over axis 1 is the one over keys."""

    def __init__(self, dim=64):
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(dim, dim, 1) for _ in range(3))
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        """x of (batch, channels, length)."""
        scores = torch.bmm(self.k(x).transpose(1, 2), self.q(x)) / x.shape[1] ** 0.5
        weights = F.softmax(scores, dim=1)
        return x + self.gamma * torch.bmm(self.v(x), weights)


class CausalLinear(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., :, None] * v[..., None, :]).cumsum(dim=-3)
        total = (q * k.cumsum(dim=-2)).sum(-1, keepdim=True)
        return ((q[..., None, :] @ state).squeeze(-2) / total).transpose(1, 2).flatten(2)


class Retention(nn.Module):
    """Retentive networks: a decay and no softmax."""

    def __init__(self, dim=64, gamma=0.9):
        super().__init__()
        self.gamma = gamma
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        n = x.shape[1]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        decay = torch.where(distance >= 0, self.gamma ** distance.clamp(min=0), 0.0)
        return (self.q(x) @ self.k(x).mT * x.shape[-1] ** -0.5 * decay) @ self.v(x)


class MultiLatent(nn.Module):
    """The score has two parts, so the scale is of the whole width."""

    def __init__(self, dim=64, heads=4, latent=16, rope=8, nope=16):
        super().__init__()
        self.heads, self.rope, self.nope = heads, rope, nope
        self.q = nn.Linear(dim, heads * (rope + nope))
        self.down, self.up = nn.Linear(dim, latent + rope), nn.Linear(latent, heads * nope * 2)
        self.o = nn.Linear(heads * nope, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q_nope, q_rope = self.q(x).view(b, n, self.heads, -1).transpose(1, 2).split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.down(x).split([self.up.in_features, self.rope], dim=-1)
        k_nope, v = self.up(latent).view(b, n, self.heads, -1).transpose(1, 2).chunk(2, dim=-1)
        scores = (q_nope @ k_nope.mT + q_rope @ k_rope[:, None].mT) * (self.nope + self.rope) ** -0.5
        scores = scores + torch.full((n, n), -math.inf).triu(1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    """Attention over channels (XCiT): the length is summed, the temperature learned."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 4, 1)
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        return (attn.softmax(dim=-1) @ v).permute(0, 3, 1, 2).reshape(b, n, d)
