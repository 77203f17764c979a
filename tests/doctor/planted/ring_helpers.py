"""Attention by parts: keys and values travel from rank to rank, the partial results are merged."""

import math

import torch


def neighbour(rank: int, world: int) -> int:
    return (rank + 1) % world


def local_scores(q, k, scale):
    return (q * scale) @ k.transpose(-1, -2)


def block(q, k, v, scale, rank_q, rank_k):
    s = local_scores(q, k, scale)
    n, m = s.shape[-2:]
    if rank_k > rank_q:
        s = torch.full_like(s, float("-inf"))
    elif rank_k == rank_q:
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=s.device).triu(2), float("-inf"))
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    p = torch.exp(s - lse)
    return p @ v, lse


def merge(out, lse, new_out, new_lse):
    total = torch.logaddexp(lse, new_lse)
    return out * torch.exp(lse - total) + new_out * torch.exp(new_lse - total), total


def ring_attention(qs, ks, vs):
    world = len(qs)
    scale = 1 / math.sqrt(qs[0].shape[-1])
    results = []
    for rank in range(world):
        out, lse = block(qs[rank], ks[rank], vs[rank], scale, rank, rank)
        other = neighbour(rank, world)
        while other != rank:
            out, lse = merge(out, lse, *block(qs[rank], ks[other], vs[other], scale, rank, other))
            other = neighbour(other, world)
        results.append(out)
    return torch.cat(results, dim=-2)


def ulysses_attention(qs, ks, vs):
    """All sequences to every rank, heads divided."""
    q, k, v = (torch.cat(parts, dim=-2) for parts in (qs, ks, vs))
    scale = 1 / math.sqrt(q.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(q * scale, k, v, is_causal=True)
    return list(out.chunk(len(qs), dim=-2))
