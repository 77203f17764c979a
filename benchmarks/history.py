"""From additive attention to the ring: what each step costs beside the one before it, on one thread.

Seconds are those of the processor that one thread takes, so that other programs on the machine count little; the sides
of a table take turns, and medians are compared. Memory is the peak above the inputs, in a process for each side. Steps
that compute one function are compared before they are timed.
"""

import platform
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import _timing
import torch
from _memory import answer, peak
from _report import agree, mebibytes, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.linear import linear_attention

TOKENS, LONG, DIM, HEADS, WINDOW, ROUNDS = 1024, 8192, 64, 8, 512, 7
CACHED, QUERY_HEADS, HEAD_DIM = 16384, 32, 128
BLOCKS = 4

Work = Callable[[], Any]


def heads(tokens: int, count: int = HEADS, dim: int = DIM) -> list[Tensor]:
    """Query, key and value of a sequence: three tensors (1, heads, tokens, dim)."""
    torch.manual_seed(0)
    return list(torch.randn(3, 1, count, tokens, dim))


def written_out(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """The formula as it is written: all scores, all weights, then the sum."""
    return (query @ key.mT * scale).softmax(-1) @ value


def additive(tokens: int, *, native: bool) -> Work:
    query, key, value = (tensor[0] for tensor in heads(tokens, 1))
    score = regard.scores.Additive(DIM, DIM, DIM).requires_grad_(False)

    def broadcast() -> Tensor:
        sums = score.project_query(query).unsqueeze(-2) + score.project_key(key).unsqueeze(-3)
        return (sums.tanh() @ score.weight).softmax(-1) @ value

    return partial(regard.attention, query, key, value, score=score) if native else broadcast


def general(tokens: int) -> Work:
    query, key, value = heads(tokens, 1)
    matrix = torch.randn(DIM, DIM) / DIM**0.5
    return lambda: written_out(query @ matrix, key, value)


def dot(tokens: int, scale: float = 1.0) -> Work:
    return partial(written_out, *heads(tokens, 1), scale)


def split(tokens: int, count: int, *, native: bool = False) -> Work:
    """A width of 512 as so many heads."""
    dim = HEADS * DIM // count
    tensors = heads(tokens, count, dim)
    return partial(regard.attention, *tensors) if native else partial(written_out, *tensors, dim**-0.5)


def flash(tokens: int, mask: masks.Mask | None = None) -> Work:
    return partial(regard.attention, *heads(tokens), mask=mask)


def stored(tokens: int) -> Work:
    return partial(written_out, *heads(tokens), DIM**-0.5)


def linear(tokens: int) -> Work:
    return partial(linear_attention, *heads(tokens), causal=True)


def in_blocks(tokens: int) -> Work:
    """All queries with each of four blocks of keys, merged as they come: the work of a ring of four, in one place."""
    query, key, value = heads(tokens)
    parts = list(zip(key.chunk(BLOCKS, -2), value.chunk(BLOCKS, -2), strict=True))

    def run() -> Tensor:
        found = regard.attention_with_lse(query, *parts[0])
        for part in parts[1:]:
            found = regard.merge([found, regard.attention_with_lse(query, *part)])
        return found[0]

    return run


SCORES: dict[str, Callable[[int], Work]] = {
    "additive, written with broadcasting": partial(additive, native=False),
    "additive, in one pass": partial(additive, native=True),
    "general, q W k": general,
    "dot, q · k": dot,
    "scaled dot, q · k / √d": partial(dot, scale=DIM**-0.5),
}
SPLITS = {
    f"{count} of {HEADS * DIM // count}, {way}": partial(split, count=count, native=way == "flash")
    for way in ("weights stored", "flash")
    for count in (1, 8, 64)
}
FLASH = {"all weights in memory": stored, "tile by tile (flash)": flash}
CAUSAL, NEAR = masks.causal(), masks.causal() & masks.window(before=WINDOW - 1)
PAIRS = {
    "causal, all earlier keys": partial(flash, mask=CAUSAL),
    f"causal, a window of {WINDOW}": partial(flash, mask=NEAR),
    "linear, elu + 1, causal": linear,
}
RING = {"one call": flash, f"{BLOCKS} blocks of keys, merged": in_blocks}
WORKS = {**SCORES, **SPLITS, **FLASH, **PAIRS, **RING}


def processor_seconds(works: Mapping[str, Work], rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of one thread's processor of each, one round after another, each in the other direction."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for round_ in range(rounds):
        for name in list(works)[:: 1 if round_ % 2 else -1]:
            spent[name].append(_timing.cpu_seconds(works[name]))
    return {name: statistics.median(each) for name, each in spent.items()}


def compare(title: str, makes: Mapping[str, Callable[[int], Work]], tokens: int) -> None:
    """A table of time and memory; each row's time is compared with that of the first."""
    spent = processor_seconds({name: make(tokens) for name, make in makes.items()})
    first = next(iter(spent.values()))
    rows = [
        [name, milliseconds(spent[name]), times(first / spent[name]), mebibytes(peak(name, tokens))] for name in makes
    ]
    table(title, ["step", "time", "times as fast as the first", "memory"], rows)


def by_length(lengths: tuple[int, ...] = (256, 1024, 4096, 8192)) -> None:
    """What flash gains over stored weights as a sequence grows."""
    rows = []
    for tokens in lengths:
        spent = processor_seconds({name: make(tokens) for name, make in FLASH.items()}, 3)
        before, after = spent.values()
        memory = [peak(name, tokens) for name in FLASH]
        rows.append(
            [f"{tokens:,}", milliseconds(before), milliseconds(after), times(before / after), *map(mebibytes, memory)]
        )
    columns = ["tokens", "weights stored", "flash", "factor", "memory, stored", "memory, flash"]
    table(f"Flash by length, {HEADS} heads of {DIM}, all pairs", columns, rows)


def by_cache(lengths: tuple[int, ...] = (512, 2048, 8192, 16384)) -> None:
    """A step of decoding by key heads and keys in the cache."""
    rows = []
    for keys in lengths:
        torch.manual_seed(0)
        query = torch.randn(1, QUERY_HEADS, 1, HEAD_DIM)
        caches = {str(count): torch.randn(2, 1, count, keys, HEAD_DIM) for count in (QUERY_HEADS, 8, 1)}
        spent = processor_seconds({n: partial(regard.attention, query, *both) for n, both in caches.items()}, 21)
        most = spent[str(QUERY_HEADS)]
        cells = [f"{both.nbytes / 2**20:g} MiB, {milliseconds(spent[name])}" for name, both in caches.items()]
        rows.append([f"{keys:,}", *cells, times(most / spent["8"]), times(most / spent["1"])])
    columns = ["keys", f"{QUERY_HEADS} key heads", "8", "1", "gain of 8", "gain of 1"]
    table(f"A step of decoding, {QUERY_HEADS} query heads of {HEAD_DIM}: cache and time", columns, rows)


def check() -> None:
    """One function, one result: no time is printed of steps that compute another one."""
    tokens = 257
    agree("additive", *([SCORES[name](tokens)()] for name in list(SCORES)[:2]))
    agree("flash", [stored(tokens)()], [flash(tokens)()])
    agree("ring", [in_blocks(tokens)()], [flash(tokens)()])
    scaled = [tensor[0] for tensor in heads(tokens, 1)]
    agree("scaled dot", [dot(tokens, DIM**-0.5)()[0]], [regard.attention(*scaled)])


def main() -> None:
    if answer(WORKS):
        return
    torch.set_num_threads(1)
    with torch.no_grad():
        check()
        print(_timing.machine(), _processor())
        compare(f"Scores, one head of {DIM}, {TOKENS:,} tokens (`benchmarks/history.py`)", SCORES, TOKENS)
        compare(f"Heads, a width of {HEADS * DIM}, {TOKENS:,} tokens", SPLITS, TOKENS)
        by_length()
        by_cache()
        compare(f"Fewer pairs, and none, {HEADS} heads of {DIM}, {LONG:,} tokens", PAIRS, LONG)
        compare(f"Blocks of keys, as in a ring, {HEADS} heads of {DIM}, {LONG:,} tokens", RING, LONG)
        sent = 4 * 2 * HEADS * DIM * LONG / BLOCKS
        print(f"\nA ring of {BLOCKS} sends {mebibytes(sent)} of keys and values a hop, {BLOCKS - 1} hops.")


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    named = " ".join(found.get(key, "").strip() for key in ("model name", "cpu family", "model"))
    return named or platform.processor()


if __name__ == "__main__":
    main()
