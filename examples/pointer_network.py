"""A pointer network sorts numbers: the attention weights are the output, and there are no values to average.

    python examples/pointer_network.py [--picture pointers.svg]

A softmax over a fixed vocabulary cannot name a place in its input, whose length differs from one example to the next.
A pointer network (Vinyals et al. 2015, arXiv 1506.03134, Eq. 3) takes the attention weights themselves as the
probability of each place. With additive scores (Bahdanau et al. 2015):

    p(y_t = j | y_<t, x) = softmax_j( vᵀ tanh(W d_t + U e_j) )        d_t (16), e_j (24), hidden 32

e_j is the encoding of number j; d_t is the decoder's state, a function of the number that was pointed at last. Nothing
is masked: that a number was used is for the network to know. The numbers are whole, different and below 30. It is
trained on lists of 8 and tested on lists of 8 and of 12.

Printed: how many lists are sorted without any mistake, and how many single pointers are right, for additive scores, for
the same network with bilinear scores (d_tᵀ W e_j), and for pointers at random.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import regard
from regard.scores import Additive, General, Score

STATE, ENCODING, LARGEST = 16, 24, 30


def lists(count: int, length: int) -> Tensor:
    """Different whole numbers below 30 in random order, (count, length), as floats."""
    return torch.rand(count, LARGEST).argsort(1)[:, :length].float()


class PointerNetwork(nn.Module):
    """Probabilities of the next place in a list of numbers, given the number that was taken last."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        self.score = score
        self.encoder = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, ENCODING))
        self.decoder = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, STATE))

    def forward(self, numbers: Tensor, last: Tensor) -> Tensor:
        """Numbers (batch, N) and those taken last (batch, M) as weights (batch, M, N)."""
        scaled = [(each[..., None] - LARGEST / 2) / 5 for each in (numbers, last)]
        keys, weights = self.encoder(scaled[0]), regard.lenses.Weights()
        seen = regard.observe(self.decoder(scaled[1]), keys, keys, weights, score=self.score)
        return seen[weights]  # with gradients


START = -1.0
"""What was taken before the first: less than any number."""


def train(model: PointerNetwork, steps: int = 400) -> None:
    """Teacher forcing: the number taken last is the right one."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
    for _ in range(steps):
        numbers = lists(64, 8)
        ordered, places = numbers.sort(1)
        last = torch.cat([torch.full((64, 1), START), ordered[:, :-1]], 1)
        right = model(numbers, last).gather(2, places[..., None])
        loss = -right.clamp(min=1e-9).log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def decode(model: PointerNetwork, numbers: Tensor) -> Tensor:
    """Greedy pointers (batch, N), each from the number at the pointer before."""
    last, pointers = torch.full((len(numbers), 1), START), []
    for _ in range(numbers.shape[1]):
        place = model(numbers, last)[:, 0].argmax(1, keepdim=True)
        pointers.append(place)
        last = numbers.gather(1, place)
    return torch.cat(pointers, 1)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train both networks, print the figures and return them."""
    parser = argparse.ArgumentParser(description="A pointer network sorts numbers.")
    parser.add_argument("--picture", help="draw the pointers of one list here: .png, .svg or .pdf")
    picture = parser.parse_args(arguments).picture
    torch.manual_seed(0)
    scores: dict[str, Score] = {
        "additive": Additive(query_dim=STATE, key_dim=ENCODING, hidden_dim=32),
        "bilinear": General(query_dim=STATE, key_dim=ENCODING),
    }
    tests = {length: lists(500, length) for length in (8, 12)}
    models, figures = {}, {}
    print(f"{'':14}{'8 numbers:':>14}{'':16}{'12 numbers:':>14}")
    print(f"{'scores':14}" + 2 * f"{'lists sorted':>14}{'pointers right':>16}")
    for name, score in scores.items():
        models[name] = model = PointerNetwork(score)
        train(model)
        for length, numbers in tests.items():
            right = decode(model, numbers) == numbers.argsort(1)
            figures[f"lists, {name}, {length}"] = float(right.all(1).float().mean())
            figures[f"pointers, {name}, {length}"] = float(right.float().mean())
    for length, numbers in tests.items():
        guessed = torch.rand(numbers.shape).argsort(1) == numbers.argsort(1)
        figures[f"lists, random, {length}"] = float(guessed.all(1).float().mean())
        figures[f"pointers, random, {length}"] = float(guessed.float().mean())
    for name in (*scores, "random"):
        cells = (f"{figures[f'lists, {name}, {n}']:14.1%}{figures[f'pointers, {name}, {n}']:16.1%}" for n in tests)
        print(f"{name:14}" + "".join(cells))
    if picture:
        numbers = tests[8][:1]
        ordered = numbers.sort(1).values
        last = torch.cat([torch.full((1, 1), START), ordered[:, :-1]], 1)
        with torch.no_grad():
            weights = models["additive"](numbers, last)[0]
        rows = [f"after {int(number)}" for number in last[0]]
        columns = [f"{int(number)}" for number in numbers[0]]
        regard.plots.save(regard.plots.heatmap(weights, rows, columns, title="Pointers of a sort"), picture)
    return figures


if __name__ == "__main__":
    main()
