"""Softmax, masks and loops that are not attention, as they stand beside it."""

import torch
from torch import nn
from torch.nn import functional as F


class Router(nn.Module):
    """Experts by the two largest probabilities of a token."""

    def __init__(self, dim=32, experts=4, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(experts)])

    def forward(self, x):
        probabilities = F.softmax(self.gate(x), dim=-1, dtype=torch.float)
        weights, chosen = probabilities.topk(self.k, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return out


class Segmentation(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.conv = nn.Conv2d(3, classes, 3, padding=1)

    def forward(self, image):
        return self.conv(image).softmax(dim=1)  # classes are the channels


class ContrastiveHead(nn.Module):
    """CLIP's loss: similarities of pictures and texts, a learned temperature, no scale."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.659))

    def forward(self, image, text):
        image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
        logits = image @ text.t() * self.logit_scale.exp()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def knowledge_distillation(student, teacher, temperature=2.0):
    return F.kl_div(
        F.log_softmax(student / temperature, dim=-1), F.softmax(teacher / temperature, dim=-1), reduction="batchmean"
    )


def sample(logits, top_k=20, temperature=0.8):
    values, _ = logits.topk(top_k)
    logits = logits.masked_fill(logits < values[..., -1:], float("-inf")) / temperature
    return torch.multinomial(logits.softmax(-1), 1)


def crf_forward(emissions, transitions, mask):
    alpha = emissions[:, 0]
    for t in range(1, emissions.shape[1]):
        new = torch.logsumexp(alpha[:, :, None] + transitions + emissions[:, t, None], dim=1)
        alpha = torch.where(mask[:, t, None], new, alpha)
    return alpha.logsumexp(-1)


class NTMRead(nn.Module):
    """Content addressing with a strength that is learned."""

    def __init__(self, dim=32):
        super().__init__()
        self.key, self.strength = nn.Linear(dim, dim), nn.Linear(dim, 1)

    def forward(self, state, memory):
        similarity = F.cosine_similarity(self.key(state)[:, None], memory, dim=-1)
        weights = (F.softplus(self.strength(state)) * similarity).softmax(dim=-1)
        return torch.einsum("bn,bnd->bd", weights, memory)


class ActorCritic(nn.Module):
    def __init__(self, obs=8, actions=4):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(obs, 32), nn.Linear(32, actions), nn.Linear(32, 1)

    def forward(self, obs, legal):
        h = torch.tanh(self.body(obs))
        logits = torch.where(legal, self.actor(h), -1e8)
        return logits.softmax(-1), self.critic(h)


def streamed(query, key, value, block=64):
    """One part of the keys after another, with the running maximum and sum: a loop over blocks to save memory."""
    scale = query.shape[-1] ** -0.5
    out = torch.zeros_like(query)
    top = torch.full(query.shape[:-1], float("-inf"), device=query.device)
    total = torch.zeros(query.shape[:-1], device=query.device)
    for start in range(0, key.shape[-2], block):
        k, v = key[..., start : start + block, :], value[..., start : start + block, :]
        scores = query @ k.mT * scale
        new_top = torch.maximum(top, scores.amax(-1))
        correction = torch.exp(top - new_top)
        p = torch.exp(scores - new_top[..., None])
        total = total * correction + p.sum(-1)
        out = out * correction[..., None] + p @ v
        top = new_top
    return out / total[..., None]


def sinkhorn(scores, rounds=8):
    for _ in range(rounds):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()
