"""Additive against dot scores by their width, trained: the table of docs/measured-claims.md.

    python recipes/additive_against_dot.py [--seeds 3] [--updates 100]

The task needs attention and nothing else, as a translator does that has to find a word's place: 16 of 256 symbols stand
in a row, each with one of 16 values; one of the symbols is asked for, and its value is the answer. What asks and what
stands in the row have learned vectors of 64 features, each their own. The dot score projects them to d features, q · k,
with and without 1/√d; the additive score has d hidden features, v · tanh(W q + U k). All matrices begin with variance
1/64, so that q · k begins with the variance d, and v with 1/d. For each score and width the learning rate is the best
of three, by the mean over the seeds; a table of all learning rates is printed below.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import regard
from regard.scores import Additive, Dot, ScaledDot, Score

SYMBOLS, LENGTH, VALUES, FEATURES = 256, 16, 16, 64
WIDTHS = (16, 64, 256, 512)
SCORES = ("q·k/√d", "q·k", "additive")
RATES = (1e-3, 3e-3, 1e-2)
BATCH, TESTED = 64, 2048


class Recall(nn.Module):
    """The probability of each value for the symbol that is asked for."""

    def __init__(self, score: str, width: int) -> None:
        super().__init__()
        self.asking, self.asked = nn.Embedding(SYMBOLS, FEATURES), nn.Embedding(SYMBOLS, FEATURES)  # of variance 1
        self.score: Score = {"q·k": Dot(), "q·k/√d": ScaledDot()}.get(score) or Additive(FEATURES, FEATURES, width)
        self.projections = nn.ModuleList()
        if not isinstance(self.score, Additive):
            self.projections.extend(nn.Linear(FEATURES, width, bias=False) for _ in range(2))
        for parameter in (*self.projections.parameters(), *self.score.parameters()):
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    def forward(self, asked: Tensor, symbols: Tensor, values: Tensor) -> Tensor:
        """Shapes: asked (batch,), symbols and values (batch, length); returns (batch, VALUES)."""
        query, key = self.asking(asked)[:, None, None], self.asked(symbols)[:, None]
        if self.projections:
            query, key = self.projections[0](query), self.projections[1](key)
        value = functional.one_hot(values, VALUES).float()[:, None]
        return regard.attention(query, key, value, score=self.score)[:, 0, 0]


def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of symbols with their values, a symbol of each that is asked for, and its value."""
    symbols = torch.rand(count, SYMBOLS, generator=generator).argsort(-1)[:, :LENGTH]
    values = torch.randint(VALUES, (count, LENGTH), generator=generator)
    place = torch.randint(LENGTH, (count, 1), generator=generator)
    return symbols.gather(1, place)[:, 0], symbols, values, values.gather(1, place)[:, 0]


def trained(score: str, width: int, rate: float, seed: int, updates: int) -> float:
    """The share of right answers, in per cent, on rows that were not trained on."""
    torch.manual_seed(seed)
    model, generator = Recall(score, width), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(updates):
        *inputs, answers = draw(BATCH, generator)
        loss = functional.nll_loss((model(*inputs) + 1e-9).log(), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    *inputs, answers = draw(TESTED, torch.Generator().manual_seed(10_000))
    with torch.no_grad():
        return 100 * float((model(*inputs).argmax(-1) == answers).double().mean())


def row(cells: Sequence[object]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Train all, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        (score, width, rate): [trained(score, width, rate, seed, options.updates) for seed in range(options.seeds)]
        for width, score, rate in itertools.product(options.widths, SCORES, RATES)
    }
    rows = [row(["d", *SCORES]), row(["---:"] * (1 + len(SCORES)))]
    for width in options.widths:
        best = [max((results[score, width, rate] for rate in RATES), key=statistics.fmean) for score in SCORES]
        rows.append(row([width, *(f"{statistics.fmean(one):.1f} ({min(one):.1f}-{max(one):.1f})" for one in best)]))
    rows += ["", row(["d", "score", *(f"{rate:g}" for rate in RATES)]), row(["---:"] * (2 + len(RATES)))]
    for width, score in itertools.product(options.widths, SCORES):
        rows.append(row([width, score, *(f"{statistics.fmean(results[score, width, rate]):.1f}" for rate in RATES)]))
    sys.stdout.write("\n".join([*rows, ""]))


if __name__ == "__main__":
    main()
