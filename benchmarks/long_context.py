"""Time and memory against length, forward and backward: exact, window, sparse and linear causal attention, and rings.

What should be seen: time of exact attention grows with n², of strided patterns (stride √n) with n√n, of windows and of
linear attention with n; memory of all with n. The limit of all is reading and writing query, key, value, output and
gradients once. A ring of two processes, of one thread each, should take the time of one process with two threads, and
half its memory in each.

    python benchmarks/long_context.py [--quick] [--picture docs/pictures/long-context.svg]

The picture needs matplotlib (`pip install 'regard[plots]'`).
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import _memory
import _timing
import torch
import torch.distributed as dist
from _report import gradients, milliseconds, table
from torch import Tensor

import regard
import regard.ring
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
RINGS = {"exact, ring of 2": regard.ring.Zigzag(), "window of 512, ring of 2": regard.ring.Contiguous()}
PROCESSES = 2
Figures = dict[str, dict[int, float]]


def is_measured(name: str, n: int) -> bool:
    return not name.startswith("exact") or n <= LONGEST_EXACT


def ring_process(rank: int, store: str, parent: Connection) -> None:
    """One process of a ring: makes the inputs of a message (name, n), or calls, and answers with seconds or bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    inputs: list[Tensor] = []
    options: dict = {}
    while (received := parent.recv()) != "end":
        if isinstance(received, tuple):
            name, n = received
            options["layout"] = RINGS[name]
            options["mask"] = masks.causal() if name.startswith("exact") else masks.causal() & masks.window(before=511)
            whole = leaves(n)
            inputs[:] = [regard.ring.shard(each.detach(), 2, RINGS[name]).clone().requires_grad_() for each in whole]
            del whole
            parent.send(0.0)
            continue
        before, began = _memory._from_now_on(), time.perf_counter()
        gradients(regard.ring.attention(*inputs, **options), inputs)
        parent.send(time.perf_counter() - began if received == "seconds" else _memory._highest() - before)
    dist.destroy_process_group()


Ask = Callable[[object], float]


@contextmanager
def ring() -> Iterator[Ask]:
    """A ring of processes; what is called sends them all one message, and gives the largest answer."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(PROCESSES)]
        started = [
            context.Process(target=ring_process, args=(rank, f"{folder}/store", theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in started:
            process.start()

        def ask(message: object) -> float:
            for ours, _ in pipes:
                ours.send(message)
            return max(ours.recv() for ours, _ in pipes)

        yield ask
        for ours, _ in pipes:
            ours.send("end")
        for process in started:
            process.join()


def times(lengths: list[int]) -> Figures:
    """Seconds of each, in turn; the processes of the rings wait while the others are measured, and these for them."""
    found: Figures = {name: {} for name in (*WORKS, *RINGS)}
    with ring() as ask:
        for n in lengths:
            works = {name: make(n) for name, make in WORKS.items() if is_measured(name, n)}
            for name, spent in _timing.in_turn(works, rounds=ROUNDS, calls=max(2**14 // n, 1)).items():
                found[name][n] = spent
            for name in RINGS:
                if is_measured(name, n):
                    ask((name, n))
                    ask("seconds")
                    calls = ROUNDS * max(2**14 // n, 1)
                    found[name][n] = statistics.median(ask("seconds") for _ in range(calls))
    return found


def memory(lengths: list[int]) -> Figures:
    """Bytes above the inputs; of a ring those of the process with most."""
    found: Figures = {name: {n: _memory.peak(name, n) for n in lengths if is_measured(name, n)} for name in WORKS}
    for name in RINGS:
        found[name] = {}
        for n in lengths:
            if is_measured(name, n):
                with ring() as ask:
                    for message in ((name, _memory.WARM), "seconds", (name, n)):
                        ask(message)
                    found[name][n] = ask("bytes")
    return found


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
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    marks = dict(zip((*WORKS, *RINGS), "osD^ox", strict=True))
    colours = dict(zip((*WORKS, *RINGS), ("C0", "C1", "C2", "C3", "C0", "C1"), strict=True))
    for axes, found, label in zip(
        figure.subplots(1, 2), (spent, held), ("seconds", "MiB above the inputs"), strict=True
    ):
        for name, figures in found.items():
            scale = 1.0 if found is spent else 2.0**-20
            values = [figures[n] * scale for n in sorted(figures)]
            style = {"linestyle": "--", "markerfacecolor": "white"} if name in RINGS else {}
            axes.plot(
                sorted(figures), values, marker=marks[name], color=colours[name], markersize=4, label=name, **style
            )
        axes.set(xscale="log", yscale="log", xlabel="length", ylabel=label)
        if found is held:
            lengths = sorted({n for figures in found.values() for n in figures})
            whole = [4.0 * HEADS * n * n / 2**20 for n in lengths]
            (weights,) = axes.plot(lengths, whole, "k:", linewidth=1, label="one copy of all weights (computed)")
            axes.legend(handles=[weights], frameon=False)
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axes.set_xticks(sorted({n for figures in found.values() for n in figures}))
        axes.xaxis.set_major_formatter(lambda n, _: f"{n / 1024:.0f}k")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False)
    figure.suptitle(f"Causal attention, forward and backward, {HEADS} heads of {DIM}, float32", fontsize=10)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # labels stay text, which Korean pages have in Korean
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
