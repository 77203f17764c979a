"""`regard.attention` against torch's operator over 200 small and middle problems: every size, mask and dtype.

Each problem is drawn from lengths of 1 to 512, 1 to 256 sequences, 1 to 32 heads of 16 to 256, self- and
cross-attention, plain, causal, padded and grouped, with and without gradients, float32, bfloat16 and float16. torch is
called as its documentation says: `is_causal`, `enable_gqa`, a bool mask (B, 1, 1, N) for padding. Results are compared
before they are timed.

Goal: at most torch's time in every row; where torch takes less than 20 µs, at most 8 µs more. The limit of small rows
is the cost of Python's calls, of large ones the rate of products (`benchmarks/products.py`).

    python benchmarks/grid.py [--picture grid.png] [--only float32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import _report
import _timing
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import masks

PROBLEMS = 200
LENGTHS = (1, 4, 8, 16, 25, 32, 48, 64, 100, 128, 200, 256, 384, 512)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS = (1, 2, 4, 8, 12, 16, 32)
DIMS = (16, 32, 64, 96, 128, 256)
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
MOST_WORK = 2**31
"""Floating-point operations of a forward pass: a fifth of a second on a slow path is enough."""
SHORT, ALLOWED = 20e-6, 8e-6
"""Where torch takes less than the former, ours may take as much more as the latter: seconds."""
HALF_WITHIN = 2e-2


@dataclass(frozen=True)
class Case:
    """One problem of the grid."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    kind: str
    gradients: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries}×{self.keys}"
        passes = "both" if self.gradients else "forward"
        return f"({self.batch}, {heads}, {lengths}, {self.dim}) {self.kind}, {passes}, {str(self.dtype)[6:]}"

    @property
    def work(self) -> float:
        """Floating-point operations of the forward pass."""
        return 4.0 * self.batch * self.heads * self.queries * self.keys * self.dim


def cases() -> list[Case]:
    """The problems of the grid, the same in each run."""
    draw, found = random.Random(0), []
    while len(found) < PROBLEMS:
        kind = draw.choice(("plain", "causal", "padded", "grouped"))
        heads, keys = draw.choice(HEADS), draw.choice(LENGTHS)
        queries = keys if kind == "causal" or draw.random() < 0.6 else draw.choice(LENGTHS)
        shared = draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0 and n < heads] or [heads])
        case = Case(
            draw.choice(BATCHES),
            heads,
            shared if kind == "grouped" else heads,
            queries,
            keys,
            draw.choice(DIMS),
            kind,
            draw.random() < 0.5,
            draw.choice(DTYPES),
        )
        if case.work <= MOST_WORK and case not in found:
            found.append(case)
    return found


def sides(case: Case) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]:
    """The same work by regard and by torch; with gradients a forward and a backward pass."""
    torch.manual_seed(0)
    query = torch.randn(case.batch, case.heads, case.queries, case.dim, dtype=case.dtype)
    key = torch.randn(case.batch, case.key_heads, case.keys, case.dim, dtype=case.dtype)
    value = torch.randn(case.batch, case.key_heads, case.keys, case.dim, dtype=case.dtype)
    upstream, inputs = torch.randn_like(query), (query, key, value)
    lengths = torch.randint(1, case.keys + 1, (case.batch,))
    mask, attn_mask = None, None
    if case.kind == "causal":
        mask = masks.causal()
    elif case.kind == "padded":
        mask, attn_mask = masks.padding(lengths), (torch.arange(case.keys) < lengths[:, None])[:, None, None]

    def ours() -> Tensor:
        return regard.attention(query, key, value, mask=mask)

    def theirs() -> Tensor:
        grouped = case.kind == "grouped"
        return scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=case.kind == "causal", enable_gqa=grouped
        )

    def both(forward: Callable[[], Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        if not case.gradients:
            return lambda: (forward(),)

        def passes() -> tuple[Tensor, ...]:
            output = forward()
            return output, *torch.autograd.grad(output, inputs, upstream)

        return passes

    for tensor in inputs:
        tensor.requires_grad_(case.gradients)
    return both(ours), both(theirs)


@dataclass(frozen=True)
class Row:
    """The median times of a problem, in seconds."""

    case: Case
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Our time over torch's, less what is allowed for short problems."""
        allowed = ALLOWED if self.theirs < SHORT else 0.0
        return (self.ours - allowed) / self.theirs


def measure(case: Case, rounds: int) -> Row:
    """Both sides in turn, so many calls at once that a round takes some milliseconds."""
    ours, theirs = sides(case)
    # All results at once: over one key the gradients of queries and keys are 0, but for rounding.
    mine, other = (torch.cat([each.flatten() for each in side()]) for side in (ours, theirs))
    _report.agree(str(case), [mine], [other], within=2e-4 if case.dtype is torch.float32 else HALF_WITHIN)
    once = min(_timing.seconds(theirs, 1) for _ in range(3))
    calls = max(1, min(300, int(3e-3 / once)))
    seconds, torch_seconds, _ = _timing.compare(ours, theirs, calls=calls, rounds=rounds)
    return Row(case, seconds, torch_seconds)


def first_choices(count: int = 40) -> float:
    """The median CPU seconds of the choice of a kernel for problems never seen, so long that times are compared."""
    spent = []
    for number in range(count):
        length = 300 + 37 * number
        query, key = torch.zeros(2, 8, length, 64), torch.zeros(2, 2, length, 64)
        mask = (masks.causal() & masks.window(7 + number), masks.padding([number + 1, length]), None)[number % 3]

        def choose(q: Tensor = query, k: Tensor = key, m: masks.Mask | None = mask) -> None:
            _ = regard.explain(q, k, k, mask=m).kernel

        spent.append(_timing.cpu_seconds(choose))
    return statistics.median(spent)


def picture(rows: list[Row], path: str) -> None:
    """Our time over torch's, against torch's time; a point for each problem."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for dtype, colour in ((torch.float32, "C0"), (torch.bfloat16, "C1"), (torch.float16, "C2")):
        for gradients, marker in ((False, "o"), (True, "^")):
            some = [row for row in rows if row.case.dtype is dtype and row.case.gradients is gradients]
            label = f"{str(dtype)[6:]}, {'forward and backward' if gradients else 'forward'}"
            axes.scatter(
                [row.theirs * 1e6 for row in some],
                [row.ours / row.theirs for row in some],
                s=22,
                color=colour,
                marker=marker,
                label=label,
                alpha=0.8,
            )
    axes.set(xscale="log", yscale="log", xlabel="time of torch's operator, µs", ylabel="regard's time over torch's")
    axes.axhline(1.0, color="0.3", linewidth=1)
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"])
    axes.legend(fontsize=8)
    axes.set_title(f"{len(rows)} problems of attention, {_timing.machine()}", fontsize=9)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", metavar="FILE", help="write the grid as a picture")
    parser.add_argument("--only", default="", help="of all problems those that contain this text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worst", type=int, default=25, help="rows to print")
    options = parser.parse_args()
    print(_timing.machine())
    first = first_choices()
    rows = [measure(case, options.rounds) for case in cases() if options.only in str(case)]
    rows.sort(key=lambda row: -row.ratio)
    _report.table(
        f"The slowest of {len(rows)} problems, as a ratio",
        ("problem", "torch, µs", "regard, µs", "ratio", "ratio less what is allowed"),
        [
            (
                str(row.case),
                f"{row.theirs * 1e6:,.1f}",
                f"{row.ours * 1e6:,.1f}",
                f"{row.ours / row.theirs:.2f}",
                f"{row.ratio:.2f}",
            )
            for row in rows[: options.worst]
        ],
    )
    slower = sum(row.ratio > 1.0 for row in rows)
    median = statistics.median(row.ours / row.theirs for row in rows)
    print(f"\nslower than torch: {slower} of {len(rows)}; median ratio {median:.2f}")
    for dtype in dict.fromkeys(DTYPES):
        for gradients in (False, True):
            some = [row for row in rows if row.case.dtype is dtype and row.case.gradients is gradients]
            if some:
                print(
                    f"  {str(dtype)[6:]:<9} {'both' if gradients else 'forward':<8} median "
                    f"{statistics.median(row.ours / row.theirs for row in some):.2f}, slower in "
                    f"{sum(row.ratio > 1.0 for row in some)} of {len(some)}"
                )
    print(f"first choice of a kernel, median: {first * 1e3:.2f} ms (goal 2)")
    if options.picture:
        picture(rows, options.picture)


if __name__ == "__main__":
    main()
