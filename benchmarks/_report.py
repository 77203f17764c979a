"""Tables in Markdown, and the check that comes before every figure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table under its title."""
    print(f"\n### {title}\n")
    for row in (columns, ["---"] * len(columns), *rows):
        print(f"| {' | '.join(row)} |", flush=True)


def agree(what: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], *, within: float = 2e-4) -> None:
    """End the benchmark where two results differ by more than `within` of the largest number: no speed without it."""
    for mine, other in zip(ours, theirs, strict=True):
        scale = max(other.abs().max().item(), 1e-30)
        error = (mine.double() - other.double()).abs().max().item() / scale
        if not error <= within:
            raise SystemExit(f"{what}: the results differ by {error:.2g} of the largest number, more than {within:g}")


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The output and the gradients of its sum of squares, halved."""
    return output, *torch.autograd.grad(output, inputs, output.detach())


def milliseconds(spent: float) -> str:
    return f"{spent * 1e3:,.1f} ms" if spent < 10 else f"{spent:,.1f} s"


def mebibytes(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def met(value: float, goal: float, *, most: bool = False) -> str:
    """Whether a goal is met: `goal` is the least, or the most, that a value may be."""
    good = value <= goal if most else value >= goal
    return f"{'≤' if most else '≥'} {goal:g}: {'yes' if good else '**no**'}"
