"""Decoding steps of latent attention: absorbed, over the latents, against keys and values of all heads.

Sizes of DeepSeek-V2-Lite's layers: dim 2,048, 16 heads, latents of 512, 64 rotated features, heads of 128. Three steps
with the same result, of one token after n:

- absorbed: `LatentAttention.step`; the query meets the latents themselves, 576 numbers a token;
- expanded: keys and values of all heads are computed from the cached latents in each step, as transformers does;
- all heads cached: the usual cache of keys and values, 5,120 numbers a token.

A fourth has an indexer that chooses 256 keys, which the step attends to.

    python benchmarks/latent_decode.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import _timing
import torch
from _report import agree, mebibytes, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.nn import KVCache, LatentAttention, LatentProjections, LightningIndexer
from regard.positions import Rotary

DIM, HEADS, LATENT, ROTATED, HEAD, QUERY_LATENT, CHOSEN = 2048, 16, 512, 64, 128, 1536, 256
LENGTHS, QUICK = (256, 1024, 4096, 16384), (256, 1024)
MOST_EXPANDED = 4096
"""The longest text whose keys and values are expanded: the time grows with it, and each step takes it anew."""
ROUNDS, CALLS = 9, 3
STEPS = ROUNDS * CALLS + 2
Stepped: TypeAlias = tuple[Tensor, KVCache]


def layer(*, indexed: bool = False) -> LatentAttention:
    torch.manual_seed(0)
    query_latent = QUERY_LATENT if indexed else None
    projections = LatentProjections(
        DIM, HEADS, latent_dim=LATENT, rotary_dim=ROTATED, head_dim=HEAD, query_latent_dim=query_latent
    )
    indexer = LightningIndexer(DIM, QUERY_LATENT, num_heads=16, head_dim=128, count=CHOSEN) if indexed else None
    rotary = Rotary(ROTATED, layout="interleaved")
    return LatentAttention(projections, rotary, mask=masks.causal(), indexer=indexer).eval()


def filled(attention: LatentAttention, n: int) -> KVCache:
    """A cache of n tokens, of a sequence drawn at random."""
    stored = torch.randn(1, 1, n, LATENT + ROTATED)
    dim = attention.indexer.head_dim if isinstance(attention.indexer, LightningIndexer) else 0
    beside = torch.randn(1, 1, n, dim)
    return KVCache.static(n + STEPS).append(stored, beside)


def all_heads(attention: LatentAttention, latents: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads, from cached latents and rotated keys."""
    latent, rotated = latents.split([LATENT, ROTATED], dim=-1)
    keys, values = attention.projections.keys_and_values(latent)
    return torch.cat([keys, rotated.expand(-1, HEADS, -1, -1)], -1), values


def queries(attention: LatentAttention, token: Tensor, position: int) -> Tensor:
    plain, rotated = attention.projections.queries(token)
    assert attention.rotary is not None
    return torch.cat([plain, attention.rotary.rotate(rotated, torch.tensor([position]))], -1)


def latents(attention: LatentAttention, token: Tensor, position: int) -> Tensor:
    latent, key = attention.projections.latents(token)
    assert attention.rotary is not None
    return torch.cat([latent, attention.rotary.rotate(key, torch.tensor([position]))], -1)


def expanded_step(attention: LatentAttention, token: Tensor, cache: KVCache) -> Stepped:
    new = latents(attention, token, len(cache))
    cache = cache.append(new, new[..., :0])
    keys, values = all_heads(attention, cache.keys)
    output = regard.attention(queries(attention, token, len(cache) - 1), keys, values, scale=attention.scale)
    return attention.projections.project_output(output), cache


def usual_step(attention: LatentAttention, token: Tensor, cache: KVCache) -> Stepped:
    cache = cache.append(*all_heads(attention, latents(attention, token, len(cache))))
    query = queries(attention, token, len(cache) - 1)
    output = regard.attention(query, cache.keys, cache.values, scale=attention.scale)
    return attention.projections.project_output(output), cache


class Decoding:
    """Step after step of a way from a cache, each with the same token: a step from an older cache would copy it."""

    def __init__(self, step: Callable[[Tensor, KVCache], Stepped], token: Tensor, cache: KVCache) -> None:
        self.step, self.token, self.cache = step, token, cache

    def __call__(self) -> Tensor:
        output, self.cache = self.step(self.token, self.cache)
        return output


def decoding_steps(lengths: tuple[int, ...]) -> None:
    plain, indexed, rows = layer(), layer(indexed=True), []
    for n in lengths:
        token, cache = torch.randn(1, 1, DIM), filled(plain, n)
        usual = KVCache.static(n + STEPS).append(*all_heads(plain, cache.keys))
        works = {
            "absorbed": Decoding(plain.step, token, cache),
            "all heads": Decoding(partial(usual_step, plain), token, usual),
            "indexed": Decoding(indexed.step, token, filled(indexed, n)),
        }
        if n <= MOST_EXPANDED:
            again = KVCache.static(n + STEPS).append(cache.keys, cache.values)
            works["expanded"] = Decoding(partial(expanded_step, plain), token, again)
        results = [works[name]() for name in works if name != "indexed"]
        agree(f"{n} tokens", results[:1] * (len(results) - 1), results[1:])
        spent = _timing.in_turn(works, rounds=ROUNDS, calls=CALLS)
        rows.append(
            [
                f"{n:,}",
                milliseconds(spent["absorbed"]),
                milliseconds(spent["expanded"]) if "expanded" in spent else "–",
                times(spent["expanded"] / spent["absorbed"]) if "expanded" in spent else "–",
                milliseconds(spent["all heads"]),
                times(spent["all heads"] / spent["absorbed"]),
                f"{mebibytes(cache.keys.nbytes)}, {mebibytes(usual.keys.nbytes + usual.values.nbytes)}",
                milliseconds(spent["indexed"]),
            ]
        )
    columns = ["tokens", "absorbed", "expanded", "of absorbed", "all heads cached", "of absorbed", "caches"]
    title = f"A decoding step of latent attention, dim {DIM:,}, {HEADS} heads (`benchmarks/latent_decode.py`)"
    table(title, [*columns, f"indexer, {CHOSEN} keys"], rows)


def main(*, quick: bool = False) -> None:
    with torch.no_grad():
        decoding_steps(QUICK if quick else LENGTHS)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
