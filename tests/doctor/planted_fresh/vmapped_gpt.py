"""A GPT of pure functions on one sequence and one head, mapped over heads and batch."""

import math
from functools import partial

import torch
from torch.func import vmap


def init(vocab=64, dim=32, heads=4, layers=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g) / math.sqrt(shape[0])
    blocks = {}
    for i in range(layers):
        blocks[f"wqkv{i}"] = normal(dim, 3, heads, dim // heads)
        blocks[f"wo{i}"] = normal(dim, dim)
    return {"embed": normal(vocab, dim), "pos": normal(128, dim), **blocks}


def head(mask, q, k, v):
    """One head: (n, d), (n, d), (n, d) -> (n, d)."""
    logits = q @ k.T / math.sqrt(q.shape[-1])
    logits = torch.where(mask, logits, torch.tensor(-1e4, dtype=logits.dtype))
    return torch.softmax(logits, dim=-1) @ v


def triangle(n):
    return torch.tril(torch.ones(n, n, dtype=torch.bool), diagonal=1)


def strict_head(q, k, v):
    n, d = q.shape
    logits = torch.einsum("id,jd->ij", q, k) * d**-0.5
    logits = logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
    return logits.softmax(-1) @ v


def block(params, i, x, attend, in_dims):
    q, k, v = torch.einsum("ne,eshd->snhd", x, params[f"wqkv{i}"])
    out = vmap(attend, in_dims=in_dims, out_dims=1)(q, k, v)
    return x + out.flatten(1) @ params[f"wo{i}"]


def forward(params, tokens, layers=2):
    n = tokens.shape[-1]

    def one(ids):
        x = params["embed"][ids] + params["pos"][:n]
        for i in range(layers):
            x = block(params, i, x, partial(head, triangle(n)), (1, 1, 1))
        return x @ params["embed"].T

    return torch.stack([one(ids) for ids in tokens])


def forward_strict(params, tokens, layers=2):
    n = tokens.shape[-1]

    def one(ids):
        x = params["embed"][ids] + params["pos"][:n]
        for i in range(layers):
            q, k, v = torch.einsum("ne,eshd->snhd", x, params[f"wqkv{i}"])
            heads = vmap(strict_head, in_dims=0, out_dims=0)(q, k, v)
            x = x + heads.flatten(1) @ params[f"wo{i}"]
        return x @ params["embed"].T

    return torch.stack([one(ids) for ids in tokens])
