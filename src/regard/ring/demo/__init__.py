"""Train a small model on one long sequence that is cut over processes, and again in one: the losses are the same.

    torchrun --nproc-per-node 4 -m regard.ring.demo

Each process has the tokens of its shard; only attention knows of the others. Gradients of parameters are summed over
processes before each update, as data-parallel training does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import masks
from ...attention import attention as attention_of_one
from ...masks import Mask
from ...positions import Rotary
from ..layout import RingLayout, balanced
from ..ring_attention import attention
from ..sharding import shard

SYMBOLS, DIM, HEADS, LAYERS = 32, 64, 4, 2
Attend = Callable[..., Tensor]


class WindowedReader(nn.Module):
    """A language model of a few layers: rotary embedding, windows with sinks of the first tokens, feed-forward."""

    def __init__(self, attend: Attend, mask: Mask) -> None:
        super().__init__()
        self.attend, self.mask, self.rotary = attend, mask, Rotary(DIM // HEADS)
        self.embedding = nn.Embedding(SYMBOLS, DIM)
        self.maps = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(LAYERS)
        )
        self.output = nn.Linear(DIM, SYMBOLS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (n, symbols) of the token after each of `tokens` (n,), which are at `positions` (n,)."""
        x, rotation = self.embedding(tokens), self.rotary.rotation(positions)
        for project, mix in zip(self.maps, self.mixers, strict=True):
            query, key, value = project(x).view(1, -1, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
            query, key = rotation.rotate(query), rotation.rotate(key)
            x = x + self.attend(query, key, value, mask=self.mask).transpose(1, 2).flatten(2)[0]
            x = x + mix(x)
        return self.output(x)


def make_text(length: int) -> Tensor:
    """Symbols (length,) of a chain in which each is one of two that its forerunner allows, the first mostly."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randint(SYMBOLS, (SYMBOLS, 2), generator=generator).tolist()
    choices = (torch.rand(length, generator=generator) < 0.2).long().tolist()
    text = [0]
    for choice in choices[1:]:
        text.append(following[text[-1]][choice])
    return torch.tensor(text)


def train(attend: Attend, mask: Mask, parts: tuple[Tensor, Tensor, Tensor], steps: int, length: int) -> Iterator[float]:
    """The loss before each update: the mean over all tokens of all processes, which each have a part.

    parts: tokens, the tokens after them, and their positions.
    """
    torch.manual_seed(0)
    model = WindowedReader(attend, mask)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, following, positions = parts
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens, positions), following, reduction="sum") / length
        loss.backward()
        total = loss.detach().clone()
        if attend is not attention_of_one:
            for tensor in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
                dist.all_reduce(tensor)
        optimizer.step()
        yield float(total)


def run(length: int, steps: int, window: int) -> list[tuple[float, float]]:
    """The losses of the ring and, on rank 0, of one process; printed by rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text, positions = make_text(length + 1), torch.arange(length)
    whole = text[:-1], text[1:], positions
    mask = masks.causal() & (masks.window(before=window - 1) | masks.prefix(4))
    layout: RingLayout = balanced(mask, length, size)
    first, second, third = (shard(tensor, 0, layout) for tensor in whole)
    began = time.perf_counter()
    ring = list(train(partial(attention, layout=layout), mask, (first, second, third), steps, length))
    spent = time.perf_counter() - began
    dist.barrier()
    if rank:
        return []
    write = sys.stdout.write
    write(f"{length:,} tokens over {size} processes, {layout}, {mask!r}: {spent / steps:.2f} s an update\n")
    alone = list(train(attention_of_one, mask, whole, steps, length))
    write("update  loss of the ring  of one process\n")
    for step, (ours, theirs) in enumerate(zip(ring, alone, strict=True)):
        write(f"{step:6}  {ours:16.6f}  {theirs:14.6f}\n")
    return list(zip(ring, alone, strict=True))


def main() -> None:
    """Read the options, join the processes that torchrun has started, and train."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node 4 -m regard.ring.demo", description=__doc__)
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=10, help="updates")
    parser.add_argument("--window", type=int, default=512, help="tokens that each attends to")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        run(options.length, options.steps, options.window)
    finally:
        dist.destroy_process_group()
