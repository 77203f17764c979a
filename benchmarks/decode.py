"""One query over many keys, heads in groups: what counts is how fast keys and values are read.

Peers: torch's operator with enable_gqa, and with the keys repeated. The limit is the machine's rate of reading the same
bytes, measured in the same run.
"""

import itertools
from functools import partial

import _timing
import torch
from _report import agree, met, milliseconds, table, times
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard

KEYS, HEADS, KEY_HEADS, DIM, ROUNDS = 16384, 32, 8, 128, 21


def main(keys: int = KEYS) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    query = torch.randn(1, HEADS, 1, DIM)
    both = torch.randn(2, 1, KEY_HEADS, keys, DIM)
    key, value = both
    group = HEADS // KEY_HEADS

    def repeated() -> torch.Tensor:
        return sdpa(query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1))

    works = {
        "regard": lambda: regard.attention(query, key, value),
        "SDPA, enable_gqa": lambda: sdpa(query, key, value, enable_gqa=True),
        "reading": both.sum,
    }
    agree("decode", [works["regard"]()], [repeated()])
    agree("decode", [works["regard"]()], [works["SDPA, enable_gqa"]()])
    with torch.no_grad():
        spent = _timing.in_turn(works, rounds=ROUNDS)
        slow = _timing.in_turn({"regard": works["regard"], "repeated": repeated}, rounds=ROUNDS // 3)
    grouped, ratio = spent["SDPA, enable_gqa"] / spent["regard"], slow["repeated"] / slow["regard"]
    read, own = (4 * both.numel() / spent[side] for side in ("reading", "regard"))
    rows = [
        ["SDPA, enable_gqa", milliseconds(spent["SDPA, enable_gqa"]), milliseconds(spent["regard"]), times(grouped)],
        ["SDPA, keys repeated", milliseconds(slow["repeated"]), milliseconds(slow["regard"]), times(ratio)],
        ["a sum over the same bytes", f"{read / 1e9:.1f} GB/s", f"{own / 1e9:.1f} GB/s", f"{own / read:.0%}"],
    ]
    for row, value_, goal in zip(rows, (grouped, ratio, own / read), (2, 15, 0.75), strict=True):
        row.append(met(value_, goal))
    title = f"Decode: {HEADS} query and {KEY_HEADS} key heads of {DIM}, {keys:,} keys (`benchmarks/decode.py`)"
    table(title, ["peer", "peer's", "regard's", "ratio", "goal"], rows)
    print("\nThe limit is the sum: keys and values have to be read once.")


def by_key_heads(keys: int = KEYS) -> None:
    """A step of multi-head, grouped-query and multi-query attention: as many query heads, fewer key heads."""
    query, rows = torch.randn(1, HEADS, 1, DIM), []
    caches = {str(heads): torch.randn(2, 1, heads, keys, DIM) for heads in (HEADS, KEY_HEADS, 1)}
    with torch.no_grad():
        spent = _timing.in_turn(
            {heads: partial(regard.attention, query, *cache) for heads, cache in caches.items()}, rounds=ROUNDS
        )
    for heads, cache in caches.items():
        rows.append([heads, f"{cache.nbytes / 2**20:.0f} MiB", milliseconds(spent[heads])])
    table(f"{HEADS} query heads of {DIM}, {keys:,} keys", ["key heads", "keys and values", "time of a step"], rows)


def by_queries(keys: int = KEYS) -> None:
    """Several queries at once beside one, causal among each other: speculative decoding and chunked prefill.

    Keys and values are read once for all. With groups of 4 heads, 32 rows share a key head; with equal heads, 8.
    """
    several, rows = 8, []
    for key_heads, dtype in itertools.product((KEY_HEADS, HEADS), (torch.float32, torch.bfloat16, torch.float16)):
        key, value = torch.randn(2, 1, key_heads, keys, DIM).to(dtype)
        queries = {count: torch.randn(1, HEADS, count, DIM).to(dtype) for count in (1, several)}
        with torch.no_grad():
            spent = _timing.in_turn(
                {
                    str(count): partial(regard.attention, query, key, value, mask=regard.masks.causal())
                    for count, query in queries.items()
                },
                rounds=ROUNDS,
            )
        ratio = spent[str(several)] / spent["1"]
        one, all_ = (milliseconds(spent[str(count)]) for count in queries)
        row = [str(key_heads), str(dtype).removeprefix("torch."), one, all_, times(ratio)]
        rows.append([*row, met(ratio, 1.3, most=True)])
    table(
        f"{several} queries over {keys:,} keys, {HEADS} query heads of {DIM}",
        ["key heads", "dtype", "one query", f"{several} queries", "ratio", "goal"],
        rows,
    )


def by_dim(keys: int = KEYS) -> None:
    """Heads of other dims, whole vectors or not: numbers that are read in a second, beside those of heads of 128."""
    dims, rows = (DIM, 64, 72, 80, 96, 120, 32), []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        works, numbers = {}, {}
        for dim in dims:
            query, cache = torch.randn(1, HEADS, 1, dim).to(dtype), torch.randn(2, 1, KEY_HEADS, keys, dim).to(dtype)
            works[str(dim)], numbers[str(dim)] = partial(regard.attention, query, *cache), cache.numel()
        with torch.no_grad():
            spent = _timing.in_turn(works, rounds=ROUNDS)
        rates = {dim: numbers[dim] / spent[dim] / 1e9 for dim in works}
        rows.append([str(dtype).removeprefix("torch."), *(f"{rates[dim]:.1f}" for dim in works)])
    title = f"10⁹ numbers a second by the dim of a head, {HEADS} query and {KEY_HEADS} key heads, {keys:,} keys"
    table(title, ["dtype", *(str(dim) for dim in dims)], rows)


if __name__ == "__main__":
    main()
    by_key_heads()
    by_queries()
    by_dim()
