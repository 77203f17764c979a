"""Time and memory against length, forward and backward: exact, window, sparse and linear causal attention.

What should be seen: time of exact attention grows with n², of strided patterns (stride √n) with n√n, of windows and of
linear attention with n; memory of all with n. The limit of all is reading and writing query, key, value, output and
gradients once.

    python benchmarks/long_context.py [--quick] [--picture docs/pictures/long-context.svg]

The picture needs matplotlib (`pip install 'regard[plots]'`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import _memory
import _timing
import torch
from _report import gradients, milliseconds, table
from torch import Tensor

import regard
from regard import masks

HEADS, DIM, ROUNDS = 4, 64, 3
LENGTHS = [2**power for power in range(10, 18)]
LONGEST_EXACT = 2**15
"""Exact attention of a longer sequence takes minutes."""
MEMORY_LENGTHS = [2**12, 2**14, 2**16]
Work = Callable[[], object]


def leaves(n: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [tensor.requires_grad_() for tensor in torch.randn(3, 1, HEADS, n, DIM).unbind()]


def exact(n: int) -> Work:
    inputs, mask = leaves(n), masks.causal()
    return lambda: gradients(regard.attention(*inputs, mask=mask), inputs)


def window(n: int) -> Work:
    inputs, mask = leaves(n), masks.causal() & masks.window(before=511)
    return lambda: gradients(regard.attention(*inputs, mask=mask), inputs)


def sparse(n: int) -> Work:
    stride = round(math.sqrt(n))
    inputs, mask = leaves(n), masks.causal() & (masks.window(before=stride) | masks.strided(stride))
    return lambda: gradients(regard.attention(*inputs, mask=mask), inputs)


def linear(n: int) -> Work:
    inputs = leaves(n)
    return lambda: gradients(regard.linear_attention(*inputs, causal=True), inputs)


WORKS = {"exact": exact, "window of 512": window, "window and stride √n": sparse, "linear, elu + 1": linear}
Figures = dict[str, dict[int, float]]


def times(lengths: list[int]) -> Figures:
    found: Figures = {name: {} for name in WORKS}
    for n in lengths:
        works = {name: make(n) for name, make in WORKS.items() if name != "exact" or n <= LONGEST_EXACT}
        for name, spent in _timing.in_turn(works, rounds=ROUNDS, calls=max(2**14 // n, 1)).items():
            found[name][n] = spent
    return found


def memory(lengths: list[int]) -> Figures:
    return {
        name: {n: _memory.peak(name, n) for n in lengths if name != "exact" or n <= LONGEST_EXACT} for name in WORKS
    }


def report(title: str, found: Figures, words: Callable[[float], str]) -> None:
    lengths = sorted({n for figures in found.values() for n in figures})
    rows = []
    for name, figures in found.items():
        known = sorted(figures)
        growth = (figures[known[-1]] / figures[known[-2]]) ** (1 / math.log2(known[-1] / known[-2]))
        cells = [words(figures[n]) if n in figures else "" for n in lengths]
        rows.append([name, *cells, f"{growth:.2f} ×"])
    table(title, ["", *(f"{n:,}" for n in lengths), "by twice the length"], rows)


def draw(spent: Figures, held: Figures, path: Path) -> None:
    """Both figures side by side, in logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    marks = dict(zip(WORKS, "osD^", strict=True))
    for axes, found, label in zip(
        figure.subplots(1, 2), (spent, held), ("seconds", "MiB above the inputs"), strict=True
    ):
        for name, figures in found.items():
            scale = 1.0 if found is spent else 2.0**-20
            values = [figures[n] * scale for n in sorted(figures)]
            axes.plot(sorted(figures), values, marker=marks[name], markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
        if found is held:
            lengths = sorted({n for figures in found.values() for n in figures})
            whole = [4.0 * HEADS * n * n / 2**20 for n in lengths]
            (weights,) = axes.plot(lengths, whole, "k--", linewidth=1, label="one copy of all weights (computed)")
            axes.legend(handles=[weights], frameon=False)
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axes.set_xticks(sorted({n for figures in found.values() for n in figures}))
        axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:.0f}k")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    figure.suptitle(f"Causal attention, forward and backward, {HEADS} heads of {DIM}, float32", fontsize=10)
    figure.savefig(path)


def main() -> None:
    if _memory.answer(WORKS):
        return
    quick = "--quick" in sys.argv
    spent, held = times(LENGTHS[:4] if quick else LENGTHS), memory(MEMORY_LENGTHS[:2] if quick else MEMORY_LENGTHS)
    what = f"{HEADS} heads of {DIM}, forward and backward (`benchmarks/long_context.py`)"
    report(f"Time against length, {what}", spent, milliseconds)
    report(f"Memory above the inputs against length, {what}", held, lambda size: f"{size / 2**20:,.1f} MiB")
    print(f"\n{_timing.machine()}")
    if "--picture" in sys.argv:
        draw(spent, held, Path(sys.argv[sys.argv.index("--picture") + 1]))


if __name__ == "__main__":
    main()
