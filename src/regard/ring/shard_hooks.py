"""Attention hooks, such as those of records, in the process of rank 0 for the whole sequence that processes share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..kernels.hooks import AttentionHook
from ..kernels.nan_safety import finite_problem
from .handshake import TAGS, Agreement
from .key_exchange import KINDS
from .layout import Shards
from .peers import Peers
from .ring_attention import KEY_KIND, LSE_KIND, QUERY_KIND, VALUE_KIND


def described_hook(hook: AttentionHook | None) -> str:
    """Whether there is a hook, which all processes need to agree on, as text."""
    return "none" if hook is None else "one"


def call_hook(peers: Peers, hook: AttentionHook, problem: Problem, agreed: Agreement, lse: Tensor) -> None:
    """Call a hook in the process of rank 0 with the problem of all processes.

    Queries, keys, values and log-sum-exps are sent there. Memory: that of the whole sequence in the process of rank 0.
    """
    with torch.no_grad():
        first = agreed.number * TAGS + KINDS
        query = gather_to_first(peers, problem.pairs.query, agreed.queries, first + QUERY_KIND)
        key = gather_to_first(peers, problem.pairs.key, agreed.keys, first + KEY_KIND)
        value = gather_to_first(peers, problem.value, agreed.keys, first + VALUE_KIND)
        whole_lse = gather_to_first(peers, lse.unsqueeze(-1), agreed.queries, first + LSE_KIND)
        if query is None or key is None or value is None or whole_lse is None:
            return
        whole = replace(problem, pairs=replace(problem.pairs, query=query, key=key), value=value)
        hook(finite_problem(whole), whole_lse.squeeze(-1))


def gather_to_first(peers: Peers, tensor: Tensor, shards: Shards, tag: int) -> Tensor | None:
    """The rows (..., n, ·) of all processes in the order of their positions, in the process of rank 0."""
    when_sent = tensor.detach().contiguous()
    if peers.rank:
        peers.post([(0, when_sent, tag)], []).wait()
        return None
    leading, width, total = tensor.shape[:-2], tensor.shape[-1], sum(shards.lengths)
    offset = min(piece[0] for own in shards.pieces for piece in own)
    whole = when_sent.new_empty(*leading, total, width)
    for rank, length in enumerate(shards.lengths):  # one after another: no more than one shard is there twice
        part = when_sent
        if rank:
            part = when_sent.new_empty(*leading, length, width)
            peers.post([], [(rank, part, tag)]).wait()
        for rows, positions in shards.rows(rank):
            at = slice(positions.start - offset, positions.stop - offset, positions.step)
            whole[..., at, :] = part[..., rows, :]
    return whole
