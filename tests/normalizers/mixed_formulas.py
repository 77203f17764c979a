"""Talking heads and multi-token attention written out, with all weights in memory, in the dtype of the inputs."""

import torch
from torch import Tensor

INFINITY = float("inf")


def masked_scores(query: Tensor, key: Tensor, keep: Tensor, added: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Scores (B, H, M, N), 0 where a pair does not exist for some head, and which pairs exist."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    exists = keep.expand(query.shape[0], query.shape[1], *keep.shape[-2:]).all(1, keepdim=True)
    scores = torch.einsum("bhmd,bhnd->bhmn", query, key) / query.shape[-1] ** 0.5 + added
    return torch.where(exists, scores, 0.0), exists


def safe_softmax(logits: Tensor, exists: Tensor) -> Tensor:
    """The softmax over pairs that exist; 0 in rows of which none does."""
    some = exists.any(-1, keepdim=True)
    weights = logits.masked_fill(~exists & some, -INFINITY).softmax(-1)
    return torch.where(exists, weights, 0.0)


def output_of(weights: Tensor, value: Tensor) -> Tensor:
    return torch.einsum("bhmn,bhnd->bhmd", weights, value.repeat_interleave(weights.shape[1] // value.shape[1], 1))


def talking_weights(query: Tensor, key: Tensor, keep: Tensor, *parts: Tensor, added: Tensor | float = 0.0) -> Tensor:
    before, after = parts
    scores, exists = masked_scores(query, key, keep, added)
    weights = safe_softmax(torch.einsum("gh,bhmn->bgmn", before, scores), exists)
    return torch.einsum("gh,bhmn->bgmn", after, weights)


def convolution(kernel: Tensor, pairs: Tensor) -> Tensor:
    """One shifted copy of the pairs for each number of a kernel."""
    queries, keys = pairs.shape[-2:]
    result = torch.zeros_like(pairs)
    for a in range(kernel.shape[1]):
        for b in range(kernel.shape[2]):
            back, across = kernel.shape[1] - 1 - a, b - kernel.shape[2] // 2
            shifted = torch.zeros_like(pairs)
            low, high = max(-across, 0), min(keys - across, keys)
            shifted[..., back:, low:high] = pairs[..., : queries - back, low + across : high + across]
            result = result + kernel[:, a, b, None, None] * shifted
    return result


def multi_token_weights(query: Tensor, key: Tensor, keep: Tensor, *parts: Tensor) -> Tensor:
    before, after, heads_before, heads_after = parts
    scores, exists = masked_scores(query, key, keep)
    logits = torch.einsum("gh,bhmn->bgmn", heads_before, convolution(before, scores))
    weights = torch.where(exists, convolution(after, safe_softmax(logits, exists)), 0.0)
    return torch.einsum("gh,bhmn->bgmn", heads_after, weights)
