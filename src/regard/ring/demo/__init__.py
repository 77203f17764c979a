"""Train a small model on one long sequence that is cut over processes, and beside it in one: the losses are the same.

    torchrun --nproc-per-node 4 -m regard.ring.demo

The model is written for one process. In `ring.sharded` each process has the tokens of its shard, and only attention,
softmax and linear, reads those of the others. Gradients of parameters are summed over processes before each update, as
data-parallel training does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import masks
from ...attention import attention
from ...linear import linear_attention
from ...masks import Mask
from ...positions import Rotary
from ..layout import RingLayout, Striped, Zigzag, balanced
from ..sharded_models import sharded
from ..sharding import shard

SYMBOLS, DIM, HEADS, SINKS = 32, 64, 4, 4
LAYERS = ("window", "linear", "window")


class MixedReader(nn.Module):
    """A language model of a few layers: windows with sinks, rotary embedding, linear attention, feed-forward."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask, self.rotary = mask, Rotary(DIM // HEADS)
        self.embedding = nn.Embedding(SYMBOLS, DIM)
        self.maps = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in LAYERS)
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in LAYERS
        )
        self.output = nn.Linear(DIM, SYMBOLS)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits (n, symbols) of the token after each of `tokens` (n,), which are at `positions` (n,)."""
        x, rotation = self.embedding(tokens), self.rotary.rotation(positions)
        for kind, project, mix in zip(LAYERS, self.maps, self.mixers, strict=True):
            query, key, value = project(x).view(1, -1, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
            if kind == "linear":
                context = linear_attention(query, key, value, causal=True)
            else:
                context = attention(rotation.rotate(query), rotation.rotate(key), value, mask=self.mask)
            x = x + context.transpose(1, 2).flatten(2)[0]
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


def train(mask: Mask, text: Tensor, layout: RingLayout | None, steps: int) -> Iterator[tuple[float, float]]:
    """The loss before each update, the mean over all tokens, and the seconds that the update takes.

    layout: how the tokens are cut over processes; None for one process.
    """
    torch.manual_seed(0)
    model, length = MixedReader(mask), len(text) - 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parts = text[:-1], text[1:], torch.arange(length)
    tokens, following, positions = parts if layout is None else (shard(part, 0, layout) for part in parts)
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        with nullcontext() if layout is None else sharded(layout):
            logits = model(tokens, positions)
        loss = nn.functional.cross_entropy(logits, following, reduction="sum") / length
        loss.backward()
        total = loss.detach().clone()
        if layout is not None:
            for tensor in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
                dist.all_reduce(tensor)
        optimizer.step()
        yield float(total), time.perf_counter() - began


def run(length: int, steps: int, window: int, *, compares: bool = True) -> list[tuple[float, float]]:
    """The losses of the ring and, on rank 0, of one process; rank 0 prints each update as soon as it is computed.

    compares: whether rank 0 trains in one process, too, while the others wait.
    """
    rank, size, text = dist.get_rank(), dist.get_world_size(), make_text(length + 1)
    mask = masks.causal() & (masks.window(before=window - 1) | masks.prefix(SINKS))
    layout = balanced(mask, length, size)
    if isinstance(layout, Striped):
        layout = Zigzag()  # linear attention needs consecutive positions
    ring = train(mask, text, layout, steps)
    if rank or not compares:
        pairs = ((each, None) for each in ring)
    else:
        pairs = zip(ring, train(mask, text, None, steps), strict=True)
    if not rank:
        write_heading(length, size, layout, window, compares=compares)
    losses = []
    for step, (of_ring, of_one) in enumerate(pairs):
        if not rank:
            write_update(step, of_ring, of_one)
        if of_one is not None:
            losses.append((of_ring[0], of_one[0]))
    if losses:
        largest = max(abs(ours - theirs) / theirs for ours, theirs in losses)
        sys.stdout.write(f"\nThe losses differ by {largest:.0e} of their size at most.\n")
    return losses


def write_heading(length: int, size: int, layout: RingLayout, window: int, *, compares: bool) -> None:
    """Print what is trained, and the names of the columns."""
    groups = f"{f'ring of {size}':23}one process" if compares else f"ring of {size}"
    sys.stdout.write(
        f"\nOne sequence of {length:,} tokens, cut over {size} processes by {type(layout).__name__}.\n"
        f"Layers: {', '.join(LAYERS)}; a window is {window} tokens and the first {SINKS}.\n\n"
        f"          {groups}\nupdate{'    loss        seconds' * (1 + compares)}\n"
    )


def write_update(step: int, of_ring: tuple[float, float], of_one: tuple[float, float] | None) -> None:
    """Print loss and seconds of an update."""
    both = (of_ring,) if of_one is None else (of_ring, of_one)
    columns = "".join(f"    {loss:.6f}  {seconds:9.2f}" for loss, seconds in both)
    sys.stdout.write(f"{step:6}{columns}\n")
    sys.stdout.flush()


def main() -> None:
    """Read the options, join the processes that torchrun has started, and train."""
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 4 -m regard.ring.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", type=int, default=32_768, help="tokens of the sequence (32768)")
    parser.add_argument("--steps", type=int, default=10, help="updates (10)")
    parser.add_argument("--window", type=int, default=512, help="tokens that each attends to (512)")
    parser.add_argument("--only-ring", action="store_true", help="do not train in one process beside the ring")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        run(options.length, options.steps, options.window, compares=not options.only_ring)
    finally:
        dist.destroy_process_group()
