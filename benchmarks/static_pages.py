"""A static page of a record of 12 heads: the time that it takes, and its size, beside zlib at its highest level.

Goals: at most a quarter of the time, and at most 2 % more bytes.
"""

import importlib
import statistics
import time
import zlib
from typing import Any

import _timing
import torch
from _report import milliseconds, table, times

from regard.explorer import Atlas, record

# The package has a function of this name.
static: Any = importlib.import_module("regard.explorer.static_page")

LAYERS, HEADS, HEAD_DIM, LENGTH, ROUNDS = 2, 12, 64, 512, 3


def main(length: int = LENGTH) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
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


def recorded(length: int) -> Atlas:
    """Attention of random projections of one text: neither flat nor peaked."""
    layers = [torch.nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True).eval() for _ in range(LAYERS)]
    hidden = torch.randn(1, length, HEADS * HEAD_DIM)
    model = torch.nn.ModuleList(layers)
    with torch.no_grad(), record(model) as recording:
        for layer in layers:
            hidden = hidden + 8 * layer(hidden, hidden, hidden, need_weights=False)[0]
    return recording.atlas(tokens=[str(index) for index in range(length)])


if __name__ == "__main__":
    main()
