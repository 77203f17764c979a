"""Mechanisms against plain causal attention of the same run: chosen keys, what selects them, delta rules, latents.

Goals, at n = 4,096: 256 scattered keys a query, of the causal ones, in at most 0.4 of the time of causal attention
where each head has lists of its own, and in 0.2 where a group of eight heads shares them; blocks of 64 chosen per head
in at most 1.3 times the share of the pairs that they have; of mixed heads those of mixed_heads.py. With one thread
(OMP_NUM_THREADS=1) times of chosen keys are those of the processor, which other programs change less.

    python benchmarks/every_mechanism.py [--quick]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import _timing
import delta_rules
import latent_decode
import mixed_heads
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.masks import Mask
from regard.selection import gated_blocks, lightning_indices, native_sparse_attention, overlapping_blocks

N, DIM, KEYS, BLOCK, BLOCKS, ROUNDS = 4096, 64, 256, 64, 8, 5
CAUSAL = masks.causal()
Work = Callable[[], Any]


class ListCase(NamedTuple):
    """Lists of keys or blocks, with so many heads; the goal is a share of the time, by that of the pairs."""

    heads: int
    key_heads: int
    make: Callable[[int], Mask]
    goal: Callable[[float], float]


def drawn(heads: int, rows: int, count: int, columns: int) -> Tensor:
    """For each row different numbers up to its own, (1, heads, rows, count); -1 where there are fewer."""
    torch.manual_seed(0)
    scores = torch.rand(heads, rows, columns)
    later = torch.arange(columns) > torch.arange(rows).unsqueeze(-1) * columns // rows
    best = scores.masked_fill(later, -1.0).topk(min(count, columns), -1)
    return best.indices.masked_fill(best.values < 0, -1).unsqueeze(0)


def scattered(heads: int, n: int) -> Mask:
    return masks.chosen(drawn(heads, n, KEYS, n))


def whole_blocks(heads: int, n: int) -> Mask:
    return CAUSAL & masks.blocks(drawn(heads, n // BLOCK, BLOCKS, n // BLOCK), BLOCK)


CHOSEN = {
    "256 keys, of each head": ListCase(2, 2, partial(scattered, 2), lambda share: 0.4),
    "256 keys, of 8 heads together": ListCase(8, 1, partial(scattered, 1), lambda share: 0.2),
    "8 blocks of 64, of each head": ListCase(8, 8, partial(whole_blocks, 8), lambda share: 1.3 * share),
    "8 blocks of 64, of all heads": ListCase(8, 8, partial(whole_blocks, 1), lambda share: 1.3 * share),
}


def tensors(n: int, heads: int, key_heads: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, own, n, DIM) for own in (heads, key_heads, key_heads)]


def works(n: int, heads: int, key_heads: int, mask: Mask) -> tuple[Work, Work]:
    """Forward, and forward and backward."""
    plain, leaves = tensors(n, heads, key_heads), [t.requires_grad_() for t in tensors(n, heads, key_heads)]
    return (
        partial(regard.attention, *plain, mask=mask),
        lambda: gradients(regard.attention(*leaves, mask=mask), leaves),
    )


def chosen_keys(n: int) -> None:
    rows, clock = [], time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for name, chosen in CHOSEN.items():
        mask = chosen.make(n)
        check = tensors(512, chosen.heads, chosen.key_heads)
        small = chosen.make(512)
        agree(name, [regard.attention(*check, mask=small)], [regard.attention(*check, mask=small, kernel="reference")])
        share = mask.density(n, n) / CAUSAL.density(n, n)
        own, causal = (works(n, chosen.heads, chosen.key_heads, each) for each in (mask, CAUSAL))
        for way, ours, theirs in zip(("forward", "forward and backward"), own, causal, strict=True):
            spent = _timing.in_turn({"ours": ours, "causal": theirs}, rounds=ROUNDS, clock=clock)
            ratio = spent["ours"] / spent["causal"]
            row = [name, way, f"{share:.1%}", milliseconds(spent["causal"]), milliseconds(spent["ours"]), times(ratio)]
            rows.append([*row, met(ratio, chosen.goal(share), most=True)])
    columns = ["lists", "way", "of the causal pairs", "causal()", "chosen", "ratio", "goal"]
    table(f"Chosen keys, n = {n:,}, dims of {DIM} (`benchmarks/every_mechanism.py`)", columns, rows)


def selections(n: int) -> None:
    """Forward passes with the selection of the keys."""
    query, key, value = tensors(n, 8, 2)
    index_query, index_key, weights = torch.randn(1, 4, n, 32), torch.randn(1, n, 32), torch.rand(1, n, 4)
    gates = torch.rand(1, 8, n, 3)

    def moba() -> Tensor:
        found = gated_blocks(query, key, size=256, count=3)
        return regard.attention(query, key, value, mask=CAUSAL & masks.blocks(found, (1, 256)))

    def dsa() -> Tensor:
        found = lightning_indices(index_query, index_key, weights, count=KEYS)
        return regard.attention(query, key, value, mask=masks.chosen(found.unsqueeze(1)))

    def nsa() -> Tensor:
        compressed = overlapping_blocks(key, 32, 16).mean(-2), overlapping_blocks(value, 32, 16).mean(-2)
        sizes = {"length": 32, "stride": 16, "size": 64, "count": 8, "window": 256}
        return native_sparse_attention(query, key, value, compressed, gates, **sizes)

    mechanisms = {"MoBA, 3 blocks of 256": moba, "DSA, 256 keys": dsa, "NSA, 8 blocks of 64, window 256": nsa}
    with torch.no_grad():
        spent = _timing.in_turn(
            {"causal": partial(regard.attention, query, key, value, mask=CAUSAL), **mechanisms}, rounds=3
        )
    rows = [[name, milliseconds(spent[name]), times(spent[name] / spent["causal"])] for name in mechanisms]
    title = f"Selected keys, forward with the selection, n = {n:,}, 8 heads, 2 of keys, dims of {DIM}"
    table(title, ["mechanism", "time", "of causal()"], rows)


if __name__ == "__main__":
    length = N // 4 if "--quick" in sys.argv else N
    chosen_keys(length)
    selections(length)
    delta_rules.main()
    latent_decode.main(quick="--quick" in sys.argv)
    mixed_heads.main(quick="--quick" in sys.argv)
