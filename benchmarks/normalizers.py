"""Normalizers beside softmax at n = 4,096, and beside their formulas from 16 to 1,024 keys, forward and backward.

Peers: softmax attention of the same call, for sparsemax and entmax by the standard deviation of the scores, on which
the number of keys with weight depends; and the formula over all pairs, of these two by the authors' package. Goals:
sigmoid at most 1.1 times softmax; the sparse ones faster than softmax from a deviation of 0.3 on, and never above 2
times; no normalizer slower than its formula.
"""

from __future__ import annotations

from collections.abc import Callable

import _timing
import entmax
import torch
from _report import agree, gradients, met, milliseconds, table
from torch import Tensor
from torch.nn.functional import logsigmoid

import regard
from regard import masks, normalizers
from regard.masks import Mask
from regard.normalizers import Normalizer

N, HEADS, DIM, CHECKED, ROUNDS = 4096, 2, 64, 320, 3
SIZES = 16, 64, 256, 1024
INFINITY = float("inf")
SPARSE: tuple[Normalizer, ...] = (normalizers.Sparsemax(), normalizers.Entmax(1.5))


def leaves(n: int, deviation: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, n, DIM).unbind()
    return (query * deviation).requires_grad_(), key.requires_grad_(), value.requires_grad_()


def work(
    n: int, deviation: float, mask: Mask | None, normalizer: Normalizer | None, kernel: str | None = None
) -> Callable:
    inputs = leaves(n, deviation)
    return lambda: gradients(regard.attention(*inputs, mask=mask, normalizer=normalizer, kernel=kernel), inputs)


def row(deviation: float, mask: Mask | None, normalizer: Normalizer, goal: float) -> list[str]:
    """One line: its own time beside that of softmax, measured in turn."""
    small = (work(CHECKED, deviation, mask, normalizer, kernel)() for kernel in (None, "reference"))
    agree(repr(normalizer), next(small), next(small), within=1e-3)
    ours, theirs = (work(N, deviation, mask, of) for of in (normalizer, None))
    spent, beside, _ = _timing.compare(ours, theirs, calls=1, rounds=ROUNDS)
    ratio = spent / beside
    name = "causal" if mask is not None else "all pairs"
    cells = [repr(normalizer), f"{deviation:g}", name, milliseconds(beside), milliseconds(spent), f"{ratio:.2f}"]
    return [*cells, met(ratio, goal, most=True)]


def softpick(scores: Tensor) -> Tensor:
    exponentials = scores.exp() - 1
    return exponentials.relu() / exponentials.abs().masked_fill(scores == -INFINITY, 0.0).sum(-1, keepdim=True)


def squared_relu(scores: Tensor) -> Tensor:
    squares = scores.relu().square()
    return squares / squares.sum(-1, keepdim=True).clamp(min=1e-9)


def largest(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < scores.topk(8, -1).values[..., -1:], -INFINITY).softmax(-1)


def stick_breaking(scores: Tensor) -> Tensor:
    finite = scores.clamp(min=-1e4)
    left = logsigmoid(-finite)
    return (logsigmoid(finite) + left.flip(-1).cumsum(-1).flip(-1) - left).exp() * (scores > -INFINITY)


FORMULAS: dict[str, tuple[Normalizer, Callable[[Tensor], Tensor]]] = {
    "sigmoid": (normalizers.Sigmoid(-3.0), lambda scores: (scores - 3.0).sigmoid()),
    "sparsemax": (normalizers.Sparsemax(), entmax.sparsemax),
    "entmax-1.5": (normalizers.Entmax(1.5), entmax.entmax15),
    "entmax-1.3": (normalizers.Entmax(1.3), lambda scores: entmax.entmax_bisect(scores, 1.3)),
    "softpick": (normalizers.Softpick(), softpick),
    "squared ReLU": (normalizers.ReLU(2), squared_relu),
    "stick-breaking": (normalizers.StickBreaking(), stick_breaking),
    "top 8": (normalizers.TopScores(8), largest),
}


def beside_formula(n: int, name: str) -> list[str]:
    """One line: causal attention with a normalizer, and its formula over all pairs."""
    normalizer, function = FORMULAS[name]
    above, mask = torch.ones(n, n, dtype=torch.bool).triu(1), masks.causal()
    hidden = -1e9 if function in (entmax.sparsemax, entmax.entmax15) else -INFINITY

    def formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return function((query @ key.mT / 8).masked_fill(above, hidden)) @ value

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=mask, normalizer=normalizer)

    learned = leaves(n, 1.0)
    plain = tuple(tensor.detach() for tensor in learned)
    agree(name, [ours(*plain)], [formula(*plain)], within=1e-4)
    cells = [name, f"{n:,}"]
    for way in (lambda function: function(*plain), lambda function: gradients(function(*learned), learned)):
        works = (lambda way=way: way(ours)), (lambda way=way: way(formula))
        spent, beside, _ = _timing.compare(*works, calls=max(1, 2048 // n), rounds=ROUNDS + 2)
        cells += [milliseconds(beside), milliseconds(spent), f"{spent / beside:.2f}"]
    return cells


def main() -> None:
    columns = "normalizer", "deviation of scores", "pairs", "softmax", "it", "times", "goal"
    rows = [row(1.0, mask, normalizers.Sigmoid(), 1.1) for mask in (None, masks.causal())]
    for normalizer in SPARSE:
        for deviation in (0.02, 0.1, 0.3, 1.0, 3.0):
            goal = 1.0 if deviation >= 0.3 else 2.0
            rows += [row(deviation, mask, normalizer, goal) for mask in (None, masks.causal())]
    table(f"(1, {HEADS}, {N:,}, {DIM}), forward and backward", columns, rows)
    columns = "normalizer", "n", "formula", "forward", "times", "formula, with gradients", "both", "times"
    table("Causal, against the formula", columns, [beside_formula(n, name) for name in FORMULAS for n in SIZES])


if __name__ == "__main__":
    main()
