"""What lecture notes claim of attention, measured: loops, Var(q · k) = d, saturation, additive against dot by d.

Seconds are those of the processor that one thread takes; the sides take turns, and medians are compared. `--figure
FILE` draws the histogram of scores. What Flash gains by length, and grouped heads by cache: `benchmarks/history.py`.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import _timing
import torch
from _report import agree, milliseconds, table, times
from torch import Tensor

import regard

DIMS, SAMPLES, KEYS = (4, 16, 64, 128, 512), 100_000, 10
LOOP_TOKENS, LOOP_DIM = (32, 128), 64
SCORE_TOKENS, SCORE_DIMS = 256, (16, 64, 256, 512)


def double_loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A product for each pair, then a softmax and a sum for each query."""
    rows = []
    for q in query:
        scores = torch.stack([torch.dot(q, k) / LOOP_DIM**0.5 for k in key])
        weights = scores.softmax(0)
        rows.append(sum((w * v for w, v in zip(weights, value, strict=True)), torch.zeros(value.shape[-1])))
    return torch.stack(rows)


def pure_python(query: Sequence[Sequence[float]], key: Sequence[Sequence[float]], value: Tensor) -> Tensor:
    """As `double_loop`, with Python's own numbers for the scores."""
    scores = [[sum(a * b for a, b in zip(q, k, strict=True)) / LOOP_DIM**0.5 for k in key] for q in query]
    return torch.tensor(scores).softmax(-1) @ value


def row_loop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A product of a matrix and a vector for each query."""
    return torch.stack([(key @ q / LOOP_DIM**0.5).softmax(0) @ value for q in query])


def written_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula on all queries at once."""
    return (query @ key.T / LOOP_DIM**0.5).softmax(-1) @ value


def loops() -> None:
    """Loops against one product."""
    rows = []
    for tokens in LOOP_TOKENS:
        torch.manual_seed(0)
        inputs = torch.randn(3, tokens, LOOP_DIM).unbind()
        whole = [tensor[None, None] for tensor in inputs]  # batch and heads
        lists = [tensor.tolist() for tensor in inputs[:2]]
        slow: dict[str, Callable[[], Tensor]] = {
            "torch.dot for each pair": partial(double_loop, *inputs),
            "Python's numbers for each pair": partial(pure_python, *lists, inputs[2]),
            "a product for each query": partial(row_loop, *inputs),
        }
        fast: dict[str, Callable[[], Tensor]] = {
            "the formula, all at once": partial(written_out, *inputs),
            "regard.attention": lambda whole=whole: regard.attention(*whole)[0, 0],
        }
        for name, work in (slow | fast).items():
            agree(name, [work()], [written_out(*inputs)])
        spent = {name: _median(work, 3) for name, work in slow.items()}
        spent |= {name: _median(work, 101, calls=20) for name, work in fast.items()}
        one = spent["the formula, all at once"]
        rows += [[f"{tokens}", name, f"{took * 1e3:,.3f} ms", f"{took / one:,.1f}"] for name, took in spent.items()]
    table("Loops (`benchmarks/textbook_claims.py`)", ["tokens", "way", "time", "times that of the formula"], rows)


def products() -> None:
    """The scores alone: a product for each pair against one of two matrices."""
    rows = []
    for tokens in LOOP_TOKENS:
        torch.manual_seed(0)
        query, key = torch.randn(2, tokens, LOOP_DIM).unbind()
        works = {
            "loop": lambda q=query, k=key: torch.stack([torch.stack([torch.dot(a, b) for b in k]) for a in q]),
            "product": lambda q=query, k=key: q @ k.T,
        }
        agree("products", [works["loop"]()], [works["product"]()])
        loop, product = _median(works["loop"], 3), _median(works["product"], 101, calls=50)
        rows.append([f"{tokens}", f"{loop * 1e3:,.1f} ms", f"{product * 1e6:,.1f} µs", f"{loop / product:,.0f}"])
    table("Scores alone", ["tokens", "torch.dot for each pair", "one product of matrices", "factor"], rows)


def _median(work: Callable[[], object], rounds: int, calls: int = 1) -> float:
    def repeat() -> None:
        for _ in range(calls):
            work()

    repeat()
    return statistics.median(_timing.cpu_seconds(repeat) for _ in range(rounds)) / calls


def scores(dim: int, kind: str = "independent") -> Tensor:
    """q · k of random pairs: `independent` standard normal numbers, `shifted` by 1/2, or of `alike` q and k."""
    generator = torch.Generator().manual_seed(dim)
    query, key = torch.randn(2, SAMPLES, dim, generator=generator)
    if kind == "shifted":
        query, key = query + 0.5, key + 0.5
    if kind == "alike":
        key = 0.5 * query + 0.75**0.5 * key
    return (query * key).sum(-1)


EXPECTED = {"independent": lambda d: d, "shifted": lambda d: 1.5 * d, "alike": lambda d: 1.25 * d}
"""Variances by algebra: (1 + 2 · 1/4) d where both have the mean 1/2, (1 + 1/4) d where they correlate by 1/2."""


def variances() -> None:
    rows = []
    for dim in DIMS:
        found = [(scores(dim, kind).var().item(), expected(dim)) for kind, expected in EXPECTED.items()]
        plain = scores(dim)
        cells = [f"{value:.4g} ({by_algebra:g})" for value, by_algebra in found]
        rows.append([f"{dim}", *cells, f"{(plain / dim**0.5).var():.3f}", f"{plain.abs().max():.1f}"])
    columns = ["d", "independent, mean 0", "means 1/2", "correlated by 1/2", "independent, over √d", "largest |q · k|"]
    table(f"Variance of q · k over {SAMPLES:,} pairs, measured (by algebra)", columns, rows)


def saturation() -> None:
    """The largest of ten weights, and Σ p (1 - p), how much of a gradient the softmax lets through."""
    rows = []
    for dim in (*DIMS, 1024):
        generator = torch.Generator().manual_seed(dim)
        query, key = (
            torch.randn(SAMPLES // 10, 1, dim, generator=generator),
            torch.randn(SAMPLES // 10, KEYS, dim, generator=generator),
        )
        products = (query * key).sum(-1)
        cells = []
        for scale in (1.0, dim**-0.5):
            weights = (products * scale).softmax(-1)
            largest = weights.amax(-1)
            through = (weights * (1 - weights)).sum(-1)
            cells += [f"{largest.mean():.2f}", f"{(largest > 0.99).float().mean():.0%}", f"{through.mean():.2f}"]
        rows.append([f"{dim}", *cells])
    columns = ["d", "largest weight", "above 0.99", "Σ p (1 - p)", "largest, by √d", "above 0.99", "Σ p (1 - p)"]
    table(f"Softmax of q · k over {KEYS} keys, without 1/√d and with it", columns, rows)


def by_width() -> None:
    """Time of additive and dot scores of all pairs of a short sequence, by the features of a state."""
    rows = []
    for dim in SCORE_DIMS:
        torch.manual_seed(0)
        query, key, value = torch.randn(3, SCORE_TOKENS, dim).unbind()
        score = regard.scores.Additive(dim, dim, dim).requires_grad_(False)
        options = {"dot": regard.scores.ScaledDot(), "additive": score}
        spent = {
            name: _median(partial(regard.attention, query, key, value, score=one), 31) for name, one in options.items()
        }
        ratio = times(spent["additive"] / spent["dot"])
        rows.append([f"{dim}", milliseconds(spent["dot"]), milliseconds(spent["additive"]), ratio])
    title = f"Attention of {SCORE_TOKENS} tokens by the features d of a state, projections included"
    table(title, ["d", "dot", "additive", "times as long"], rows)


def draw(path: Path) -> None:
    """Histograms of q · k for d of 4, 64 and 512, and of q · k / √d, whose three curves are one."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    grey = "#808080"  # reads on white and on dark pages alike
    colours = {4: "#3b82c4", 64: "#d9822b", 512: "#4f9d69"}
    style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), grey)
    with plt.rc_context({**style, "font.size": 11, "svg.hashsalt": "regard", "svg.fonttype": "none"}):
        figure, panels = plt.subplots(1, 2, figsize=(7.2, 2.6), layout="constrained")
        for dim, colour in colours.items():
            for panel, numbers, width in zip(panels, (scores(dim), scores(dim) / dim**0.5), (75, 4.5), strict=True):
                panel.hist(
                    numbers,
                    bins=90,
                    range=(-width, width),
                    density=True,
                    histtype="step",
                    color=colour,
                    lw=1.6,
                    label=f"d = {dim}",
                )
        for panel, name in zip(panels, ("q · k", "q · k / √d"), strict=True):
            panel.set_xlabel(name)
            panel.set_yticks([])
            panel.spines[["top", "right", "left"]].set_visible(False)
        panels[0].set_ylim(0, 0.12)
        panels[0].legend(frameon=False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="What lecture notes claim of attention, measured.")
    parser.add_argument("--figure", type=Path, help="draw the histogram into this SVG, and measure nothing")
    arguments = parser.parse_args()
    if arguments.figure is not None:
        draw(arguments.figure)
        return
    torch.set_num_threads(1)
    print(_timing.machine())
    with torch.no_grad():
        loops()
        products()
        variances()
        saturation()
        by_width()


if __name__ == "__main__":
    main()
