"""Length extrapolation: trained on programs of 32 lines, six position schemes read programs of up to 512.

    python examples/length_extrapolation.py [--seeds 3] [--picture lengths.svg]

A line of a program assigns a digit to a variable (c = 3) or asks for its digit (c ?). The answer is the digit that was
assigned last: the content of a line says which lines matter, its position which of them is the latest. Two layers with
a causal mask read the program; the schemes differ in where the position p of a line enters:

    none        softmax(q_p · k_s / √D)                     the causal mask alone says that s ≤ p
    sinusoidal  x_p + PE(p)                                 Vaswani et al. 2017, section 3.5
    learned     x_p + E[p]                                  the rows of E after the 32nd are never trained
    rotary      softmax((R_p q_p) · (R_s k_s) / √D)         Su et al. 2021: a function of p - s
    YaRN        as rotary, the trained model's low frequencies divided by length/32 when it reads: Peng et al. 2023
    ALiBi       softmax(q_p · k_s / √D - m |p - s|)         Press et al. 2022: one slope m for each head

Variable number r of 16 is as frequent as 1/r, so that answers are near and far. Printed: the share of questions that
are answered right at each length, beside the best that can be done without any order, the digit that was assigned to
the variable most often; then, in programs of 512 lines, by how many lines back the answer is. An answer more than 32
lines back is further than any in the training. A figure has a standard error of at most 1 %; what differs between seeds
is more, so that `--seeds` prints their mean and range.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import regard
from regard.nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
from regard.positions import Learned, Rotary, Sinusoidal, YaRN

VARIABLES, DIGITS, DIM, HEADS, TRAINED = 16, 8, 48, 4, 32
LENGTHS = [32, 64, 128, 256, 512]
DISTANCES = [(1, 8), (9, 32), (33, 128), (129, 511)]
SCHEMES = ["none", "sinusoidal", "learned", "rotary", "ALiBi"]
Programs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_programs(count: int, length: int, draw: torch.Generator) -> Programs:
    """Variables, digits (8 = a question), answers and how many lines back they are (0 = no question): (count, length).

    A question about a variable that has no digit yet is in the text, and is not counted.
    """
    frequency = 1 / torch.arange(1.0, VARIABLES + 1)
    variables = frequency.expand(count, -1).multinomial(length, replacement=True, generator=draw)
    digits = torch.randint(DIGITS, variables.shape, generator=draw)
    asked = torch.rand(variables.shape, generator=draw) < 0.5
    line = torch.arange(length)
    same = variables[:, :, None] == variables[:, None, :]
    assigned = same & ~asked[:, None, :] & (line < line[:, None])
    answers_at = torch.where(assigned, line, -1).amax(2).masked_fill(~asked, -1)
    back = torch.where(answers_at >= 0, line - answers_at, 0)
    return variables, digits.masked_fill(asked, DIGITS), digits.gather(1, answers_at.clamp(min=0)), back


class Reader(nn.Module):
    """Logits of the digit that each line asks for, (count, length, digits)."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.variables, self.digits = nn.Embedding(VARIABLES, DIM), nn.Embedding(DIGITS + 1, DIM)
        absolute = {"sinusoidal": Sinusoidal(DIM), "learned": Learned(LENGTHS[-1], DIM)}
        self.absolute = absolute.get(scheme)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                Attention(
                    Projections(DIM, HEADS),
                    mask=regard.masks.causal(),
                    bias=regard.biases.alibi(HEADS) if scheme == "ALiBi" else None,
                    rotary=Rotary(DIM // HEADS) if scheme == "rotary" else None,
                ),
                FeedForward(DIM, 4 * DIM),
                lambda: PreNorm(nn.LayerNorm(DIM)),
            )
            for _ in range(2)
        )
        self.logits = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIGITS))

    def forward(self, variables: Tensor, digits: Tensor) -> Tensor:
        x = self.variables(variables) + self.digits(digits)
        if self.absolute is not None:
            x = x + self.absolute(torch.arange(variables.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def scale_rotary(self, length: int) -> None:
        """Divide low frequencies by length/32, without training: positions up to `length` look like trained ones."""
        scaling = YaRN(length / TRAINED, TRAINED)
        for module in self.modules():
            if isinstance(module, Attention):
                module.rotary = Rotary(DIM // HEADS, scaling=scaling)


def train(model: Reader, updates: int, draw: torch.Generator) -> None:
    """AdamW on new programs of 32 lines."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=updates)
    for _ in range(updates):
        variables, digits, answers, back = make_programs(32, TRAINED, draw)
        loss = nn.functional.cross_entropy(model(variables, digits)[back > 0], answers[back > 0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def most_frequent(programs: Programs) -> Tensor:
    """The digit that was assigned most often to the variable of each line before it: (count, length)."""
    variables, digits, _, _ = programs
    counts = torch.zeros(*variables.shape, DIGITS)
    for variable in range(VARIABLES):
        assigned = nn.functional.one_hot(digits, DIGITS + 1)[..., :DIGITS] * (variables == variable)[..., None]
        counts = torch.where((variables == variable)[..., None], assigned.cumsum(1).float(), counts)
    return counts.argmax(2)


def accuracy(guesses: Tensor, programs: Programs, nearest: int = 1, furthest: int = LENGTHS[-1]) -> float:
    """The share of right answers among those that are `nearest` to `furthest` lines back."""
    _, _, answers, back = programs
    counted = (back >= nearest) & (back <= furthest)
    return float((guesses == answers)[counted].float().mean())


def measure(schemes: list[str], updates: int, seed: int) -> dict[str, dict[str, float]]:
    """Train a model with each scheme; its accuracies by length, and by distance in the longest programs."""
    draw = torch.Generator().manual_seed(1000 + seed)
    tests = {length: make_programs(16384 // length, length, draw) for length in LENGTHS}
    guesses: dict[str, dict[int, Tensor]] = {"no order": {n: most_frequent(test) for n, test in tests.items()}}
    for scheme in schemes:
        torch.manual_seed(seed)
        model = Reader(scheme)
        train(model, updates, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            guesses[scheme] = {length: model(*test[:2]).argmax(2) for length, test in tests.items()}
            if scheme == "rotary":
                guesses["YaRN"] = {}
                for length, test in tests.items():
                    model.scale_rotary(length)
                    guesses["YaRN"][length] = model(*test[:2]).argmax(2)
    figures = {}
    for scheme, table in guesses.items():
        figures[scheme] = {f"{length} lines": accuracy(table[length], test) for length, test in tests.items()}
        longest = LENGTHS[-1]
        for near, far in DISTANCES:
            figures[scheme][f"{near}-{far} back"] = accuracy(table[longest], tests[longest], near, far)
    return figures


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train with every scheme and seed, print the figures and return their means."""
    parser = argparse.ArgumentParser(description="Position schemes on texts longer than those of the training.")
    parser.add_argument("--seeds", type=int, default=1, help="how many trainings of each scheme")
    parser.add_argument("--updates", type=int, default=150, help="of each training")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, help="that are trained")
    parser.add_argument("--picture", help="draw accuracy by length here: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    runs = [measure(options.schemes, options.updates, seed) for seed in range(options.seeds)]
    figures: dict[str, float] = {}
    columns = list(runs[0]["no order"])
    for title, part in (("all questions", columns[: len(LENGTHS)]), ("512 lines", columns[len(LENGTHS) :])):
        print(f"{title:14}" + "".join(f"{column:>16}" for column in part))
        for scheme in runs[0]:
            cells = [torch.tensor([run[scheme][column] for run in runs]) for column in part]
            for column, cell in zip(part, cells, strict=True):
                figures[f"{scheme}, {column}"] = float(cell.mean())
            print(f"{scheme:14}" + "".join(f"{format_cell(cell):>16}" for cell in cells))
    if options.picture:
        draw_lengths(figures, list(runs[0]), options.picture)
    return figures


def format_cell(values: Tensor) -> str:
    """The mean of seeds in percent, and their range."""
    low, high = values.aminmax()
    spread = f" ({100 * low:.0f}-{100 * high:.0f})" if len(values) > 1 else ""
    return f"{float(values.mean()):.1%}{spread}"


def draw_lengths(figures: dict[str, float], schemes: list[str], path: str) -> None:
    """Two panels: accuracy by length, and by distance in the longest programs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    distances = [f"{near}-{far}" for near, far in DISTANCES]
    for scheme, style in zip(schemes, ("k:", "o-", "s-", "^-", "D-", "D--", "v-"), strict=False):
        left.plot(range(len(LENGTHS)), [figures[f"{scheme}, {length} lines"] for length in LENGTHS], style)
        right.plot(distances, [figures[f"{scheme}, {distance} back"] for distance in distances], style, label=scheme)
    left.set_xticks(range(len(LENGTHS)), [str(length) for length in LENGTHS])
    left.set(xlabel="lines of the program (trained on 32)", ylabel="questions answered right", ylim=(0, 1.02))
    right.set(xlabel="the answer is so many lines back, of 512")
    right.legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    regard.plots.save(figure, path)


if __name__ == "__main__":
    main()
