"""Static pages of records: the time that they take, and their size.

Of 2 × 12 heads beside zlib at its highest level; goals: at most a quarter of the time, and at most 2 % more bytes. Of
6 × 12 heads of 512 tokens, the size of MiniLM; goal: 5 s. With `--long FILE` a page of 8 heads of 20,000 tokens is
written there, of at most 5 MB, whose first paint `REGARD_PAGE=FILE node explorer/test/run.mjs measure` tells; goal:
0.7 s. Times of pages are of the processor: one thread makes them.
"""

import argparse
import importlib
import statistics
import time
import zlib
from typing import Any

import _timing
import torch
from _report import milliseconds, table, times

import regard
from regard.explorer import Atlas, record

# The package has a function of this name.
static: Any = importlib.import_module("regard.explorer.static_page")

LAYERS, HEADS, HEAD_DIM, LENGTH, ROUNDS = 2, 12, 64, 512, 3


def main(length: int = LENGTH) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", metavar="FILE", help="write a page of 20,000 tokens")
    long = parser.parse_args().long
    torch.manual_seed(0)
    print(_timing.machine())
    compression(length)
    rows = [page_row(recorded(length, layers=6), 6 * HEADS, length, goal=5.0)]
    if long:
        rows.append(
            page_row(recorded_windows(20_000), 8, 20_000, most=5_000_000, path=long, state="view=head&at=15000,14900")
        )
    table("Static pages", ["heads, tokens", "time", "size", "goal", "contents"], rows)


def page_row(atlas: Atlas, heads: int, length: int, *, goal: float = 0.0, path: str = "", **settings: Any) -> list[str]:
    """Make a page, and say what it took; written to `path`, where there is one."""
    start = time.process_time()
    page = static.static_page(atlas, **settings)
    spent = time.process_time() - start
    if path:
        page.save(path)
    met = f"≤ {goal:.0f} s: {'yes' if spent <= goal else '**no**'}" if goal else ""
    return [f"{heads}, {length:,}", milliseconds(spent), f"{page.size / 1e6:.2f} MB", met, page.contents]


def recorded_windows(length: int) -> Atlas:
    """8 heads with windows, of one text."""
    layer = regard.nn.Attention(
        regard.nn.Projections(128, num_heads=8), mask=regard.masks.causal() & regard.masks.window(before=255)
    )
    with torch.no_grad(), record(layer.eval()) as recording:
        layer(3 * torch.randn(1, length, 128))
    return recording.atlas(tokens=[f"t{index % 997}" for index in range(length)])


def compression(length: int) -> None:
    """Print the table of the ways to compress."""
    atlas, fast = recorded(length), static._packed
    ways = {"highest level": lambda data: static._deflated(data, 9, zlib.Z_FILTERED), "as written": fast}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    sizes: dict[str, int] = {}
    for _ in range(ROUNDS):
        for name, packed in ways.items():
            static._packed = packed
            start = time.perf_counter()
            sizes[name] = static.static_page(atlas).size
            spent[name].append(time.perf_counter() - start)
    static._packed = fast
    slow, quick = (statistics.median(spent[name]) for name in ways)
    rows = [[name, milliseconds(statistics.median(spent[name])), f"{sizes[name] / 1e6:.2f} MB"] for name in ways]
    table(f"A static page, {LAYERS} × {HEADS} heads, n = {length:,}", ["zlib", "time", "size"], rows)
    print(f"\n{times(slow / quick)} times as fast, {sizes['as written'] / sizes['highest level'] - 1:+.2%} bytes")


def recorded(length: int, layers: int = LAYERS) -> Atlas:
    """Attention of random projections of one text: neither flat nor peaked."""
    parts = [torch.nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True).eval() for _ in range(layers)]
    hidden = torch.randn(1, length, HEADS * HEAD_DIM)
    model = torch.nn.ModuleList(parts)
    with torch.no_grad(), record(model) as recording:
        for layer in parts:
            hidden = hidden + 8 * layer(hidden, hidden, hidden, need_weights=False)[0]
    return recording.atlas(tokens=[str(index) for index in range(length)])


if __name__ == "__main__":
    main()
