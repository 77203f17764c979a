"""Decoding with fewer keys: layers that share them, and keys that are kept by their weight, against a cache of all.

python benchmarks/memories.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import _timing
import torch
from _report import agree, mebibytes, milliseconds, table, times

from regard.masks import causal
from regard.models import language_model as lm
from regard.nn import H2O, TOVA, Attention, Cache, KVCache, Projections, SnapKV, WeighedCache
from regard.positions import Rotary

TOKENS, SIZE, DIM, HEADS, KEY_HEADS, ROUNDS = 16384, 1024, 1024, 16, 4, 15


def filled(layer: Attention, cache: Cache, tokens: int) -> Cache:
    """A cache after a text of so many tokens, read 1,024 at a time."""
    for part in torch.randn(1, tokens, DIM).split(SIZE, dim=1):
        _, cache = layer.step(part, cache)  # type: ignore[type-var]
    return cache


def by_weight(tokens: int) -> None:
    """One step of a layer with 1,024 keys kept by their weight, and with all keys."""
    layer = Attention(Projections(DIM, HEADS, num_kv_heads=KEY_HEADS), mask=causal(), rotary=Rotary(DIM // HEADS))
    layer.eval()
    room = WeighedCache(TOVA(4 * SIZE))
    x = torch.randn(1, 65, DIM)
    ours, theirs = (layer.step(x[:, 64:], layer.step(x[:, :64], cache)[0 + 1])[0] for cache in (room, KVCache()))
    agree("a policy with room for all", [ours], [theirs])
    caches = {
        "all keys": KVCache(),
        "H2O": WeighedCache(H2O(SIZE // 2, SIZE // 2)),
        "SnapKV": WeighedCache(SnapKV(SIZE)),
        "TOVA": WeighedCache(TOVA(SIZE)),
    }
    token = torch.randn(1, 1, DIM)

    def step(cache: Cache) -> Callable[[], object]:
        return lambda: layer.step(token, cache)  # type: ignore[type-var]

    caches = {name: filled(layer, cache, tokens) for name, cache in caches.items()}
    caches["as many keys, not weighed"] = filled(layer, KVCache(), SIZE)
    spent = _timing.in_turn({name: step(cache) for name, cache in caches.items()}, rounds=ROUNDS)
    rows = [
        [name, mebibytes(cache.nbytes), milliseconds(spent[name]), times(spent[name] / spent["all keys"])]
        for name, cache in caches.items()
    ]
    title = f"A step of a layer after {tokens:,} tokens, {HEADS} heads, {KEY_HEADS} of keys, {SIZE:,} keys kept"
    table(title, ["cache", "memory", "time", "of all keys"], rows)


def shared(tokens: int) -> None:
    """A model of 8 layers of which the last 4 read the keys of the fourth, and one whose layers have their own."""
    own, reader = lm.LayerConfig(rotary=Rotary(64)), lm.LayerConfig(rotary=Rotary(64), keys_from=3)
    rows, models, caches = [], {}, {}
    for name, layers in {"own keys": (own,) * 8, "half of the layers share": (own,) * 4 + (reader,) * 4}.items():
        config = lm.LanguageModelConfig(
            *(1000, 512, layers, lm.AttentionConfig(8, 2)), lm.GatedFeedForwardConfig(1024), tied=True
        )
        models[name] = lm.LanguageModel(config).eval()
        cache = models[name].make_cache()
        for part in torch.randint(1000, (1, tokens)).split(SIZE, dim=1):
            _, cache = models[name].next_features(part, cache)
        caches[name] = cache
    prompt, token = torch.randint(1000, (1, SIZE)), torch.randint(1000, (1, 1))
    works = {f"{name}, a step": (lambda name=name: models[name].step(token, caches[name])) for name in models}
    works |= {f"{name}, a prompt": (lambda name=name: models[name].features(prompt)) for name in models}
    spent = _timing.in_turn(works, rounds=ROUNDS)
    for name in models:
        step, whole = spent[f"{name}, a step"], spent[f"{name}, a prompt"]
        ratio = times(step / spent["own keys, a step"])
        rows.append([name, mebibytes(caches[name].nbytes), milliseconds(step), ratio, milliseconds(whole)])
    title = f"A model of 8 layers after {tokens:,} tokens"
    table(title, ["layers", "cache", "a step", "of own keys", f"a prompt of {SIZE:,}"], rows)


if __name__ == "__main__":
    length = TOKENS // 4 if "--quick" in sys.argv else TOKENS
    torch.manual_seed(0)
    with torch.no_grad():
        by_weight(length)
        shared(length)
