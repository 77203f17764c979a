"""A step of decoding over keys and values in 16, 8 and 4 bits: what counts is how fast the bytes are read.

The limit is the machine's rate of reading, of a sum over as many bytes in float32. Caches are read in turn, as those of
the layers of a model are, so that none of them is in the processor's own cache from the call before. With `--one` one
thread works, and its CPU seconds are counted, where others keep the machine busy.
"""

import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial

import _timing
import torch
from _report import met, milliseconds, table, times

import regard
from regard.nn import CacheFormat, KVCache, Packing

KEYS, HEADS, KEY_HEADS, DIM, ROUNDS, LAYERS = 16384, 32, 8, 128, 15, 4
FORMATS = {
    "bfloat16": CacheFormat(None, None),
    "int8": CacheFormat(),
    "float8, e4m3": CacheFormat(Packing("float8_e4m3fn"), Packing("float8_e4m3fn")),
    "float8, e5m2": CacheFormat(Packing("float8_e5m2"), Packing("float8_e5m2")),
    "int4": CacheFormat(Packing("int4"), Packing("int4")),
    "int4, keys by channel": CacheFormat(Packing("int4", by_channel=True), Packing("int4")),
    "int4, rotated": CacheFormat(Packing("int4", rotated=True), Packing("int4", rotated=True)),
}
GOALS = {"int8": 1.8, "int4": 3.0}


def main(keys: int = KEYS, rounds: int = ROUNDS, *, one: bool = False) -> None:
    """Heads in groups of four, and alone; and what is appended."""
    if one:
        torch.set_num_threads(1)
    print(_timing.machine())
    spend = cpu_in_turn if one else _timing.in_turn
    steps(keys, KEY_HEADS, partial(spend, rounds=rounds))
    steps(keys // 4, HEADS, partial(spend, rounds=rounds))
    appends(partial(spend, rounds=rounds))


def cpu_in_turn(works: Mapping[str, _timing.Work], *, rounds: int) -> dict[str, float]:
    """Median CPU seconds of this thread for each, in turn."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            spent[name].append(_timing.cpu_seconds(work))
    return {name: statistics.median(each) for name, each in spent.items()}


def steps(keys: int, key_heads: int, spend: Callable[..., dict[str, float]]) -> None:
    """Steps over each format, in a table."""
    torch.manual_seed(0)
    numbers = torch.randn(2, 1, key_heads, keys, DIM).bfloat16()
    query = torch.randn(1, HEADS, 1, DIM).bfloat16()
    with torch.no_grad():
        works, sizes = {}, {}
        for name, format_ in FORMATS.items():
            start = KVCache.static(keys)
            start = start if format_.keys is None else start.packed(format_)
            caches = [start.append(*numbers) for _ in range(LAYERS)]
            sizes[name] = caches[0].nbytes - caches[0].positions.nbytes
            works[name] = partial(read_all, query, [(cache.keys, cache.values) for cache in caches])
        many = [torch.randn(numbers.nbytes // 4) for _ in range(LAYERS)]
        works["a sum"], sizes["a sum"] = partial(sum_all, many), numbers.nbytes
        spent = {name: each / LAYERS for name, each in spend(works).items()}
    whole, limit = spent["bfloat16"], sizes["a sum"] / spent["a sum"]
    rows = []
    for name in works:
        rate, ratio = sizes[name] / spent[name], whole / spent[name]
        row = [name, f"{sizes[name] / 2**20:.1f} MiB", milliseconds(spent[name]), times(ratio)]
        rows.append(
            [*row, f"{rate / 1e9:.1f} GB/s", f"{rate / limit:.0%}", met(ratio, GOALS[name]) if name in GOALS else ""]
        )
    table(
        f"Decode over a cache: {HEADS} query and {key_heads} key heads of {DIM}, {keys:,} keys",
        ["stored as", "bytes", "a step", "against bfloat16", "read at", "of the sum's rate", "goal"],
        rows,
    )


def appends(spend: Callable[..., dict[str, float]]) -> None:
    """One more token, and a prompt: what it takes to make codes."""
    rows, token, prompt = [], torch.randn(2, 1, KEY_HEADS, 1, DIM).bfloat16(), torch.randn(2, 1, KEY_HEADS, 2048, DIM)
    prompt = prompt.bfloat16()
    with torch.no_grad():
        full = {
            name: (KVCache.static(4096) if each.keys is None else KVCache.static(4096).packed(each)).append(*prompt)
            for name, each in FORMATS.items()
        }
        one = spend({name: partial(cache.append, *token) for name, cache in full.items()})
        all_ = spend(
            {name: partial(KVCache(cache.policy, None, cache.formats).append, *prompt) for name, cache in full.items()}
        )
    for name in full:
        rows.append([name, milliseconds(one[name]), milliseconds(all_[name])])
    table(f"Append to a cache of {KEY_HEADS} heads of {DIM}", ["stored as", "a token", "2,048 tokens"], rows)


def read_all(query: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A step over each cache."""
    for keys, values in caches:
        regard.attention(query, keys, values)


def sum_all(tensors: list[torch.Tensor]) -> None:
    """A sum over each tensor."""
    for each in tensors:
        each.sum()


if __name__ == "__main__":
    main(one="--one" in sys.argv)
