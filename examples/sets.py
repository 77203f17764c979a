"""Count the clusters of a set: Set Transformer and Perceiver, beside pooling that sees each point by itself.

    python examples/sets.py [--picture seeds.svg]

A set has no order, and its answer may depend on how its elements lie to each other. Deep Sets (Zaheer et al. 2017) map
each element by itself and take the mean. The Set Transformer (Lee et al. 2019, arXiv 1810.00825) lets elements attend
to each other through m learned points (ISAB), and pools by a learned seed (PMA):

    H = MAB(I, X),  ISAB(X) = MAB(X, H),      PMA(Z) = MAB(S, rFF(Z)),
    MAB(X, Y) = LayerNorm(A + rFF(A)),  A = LayerNorm(X + Multihead(X, Y, Y))

A Perceiver (Jaegle et al. 2021, arXiv 2103.03206) reads the set into learned latents, which attend to each other. Both
are linear in the size of the set: `nn.InducedSetBlock`, `nn.PooledSet`, `nn.PerceiverEncoder`.

The task: a set has 20 to 40 points in 4 dimensions around 1 to 5 centres, which are drawn anew for each set; how many
centres are there? Padding fills the sets of a batch, and a mask says what exists.

Printed: the share of 1,000 other sets whose centres are counted right (standard error about 1.5 %), of the larger
class, of mean pooling, of Set Transformer and Perceiver, with their numbers of parameters; what becomes of it for sets
of 100 points; and by how much a permutation of the points changes a logit of the Set Transformer.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import regard
from regard.masks import padding
from regard.nn import (
    Attention,
    CrossBlock,
    FeedForward,
    InducedSetBlock,
    PerceiverEncoder,
    PooledSet,
    PostNorm,
    PreNorm,
    Projections,
    TransformerBlock,
)

FEATURES, MOST, DIM, HEADS, POINTS = 4, 5, 32, 4, 8


def make_sets(count: int, draw: torch.Generator, least: int = 20, most: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    """Points (count, most, features), how many of them exist (count,), and centres minus one (count,)."""
    centres = torch.randn(count, MOST, FEATURES, generator=draw) * 2
    counts = torch.randint(MOST, (count,), generator=draw)
    members = (torch.rand(count, most, generator=draw) * (counts[:, None] + 1)).long()
    members[:, :MOST] = torch.minimum(torch.arange(MOST), counts[:, None])  # each centre has a point at least
    noise = torch.randn(count, most, FEATURES, generator=draw) * 0.2
    points = centres.gather(1, members[..., None].expand(-1, -1, FEATURES)) + noise
    return points, torch.randint(least, most + 1, (count,), generator=draw), counts


def cross_block(residual: type[PostNorm] | type[PreNorm]) -> CrossBlock:
    """Attention to another set, and a feed-forward layer."""
    norms = (residual(nn.LayerNorm(DIM)) for _ in range(2))
    return CrossBlock(Attention(Projections(DIM, HEADS)), FeedForward(DIM, DIM), *norms)


class MeanPooling(nn.Module):
    """Deep Sets: each point by itself, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        wide = 3 * DIM
        self.each = nn.Sequential(
            nn.Linear(FEATURES, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()
        )
        self.classes = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, MOST))

    def forward(self, points: Tensor, sizes: Tensor) -> Tensor:
        there = (torch.arange(points.shape[1]) < sizes[:, None])[..., None]
        return self.classes((self.each(points) * there).sum(1) / sizes[:, None])


class SetTransformer(nn.Module):
    """Two ISABs and a PMA: (batch, n, features) to logits (batch, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, DIM)
        self.blocks = nn.ModuleList(
            InducedSetBlock(POINTS, DIM, gather=cross_block(PostNorm), spread=cross_block(PostNorm)) for _ in range(2)
        )
        self.pool = PooledSet(1, DIM, block=cross_block(PostNorm), feed_forward=FeedForward(DIM, DIM))
        self.classes = nn.Linear(DIM, MOST)

    def elements(self, points: Tensor, sizes: Tensor) -> Tensor:
        x = self.embed(points)
        for block in self.blocks:
            x = block(x, mask=padding(lengths=sizes))
        return x

    def forward(self, points: Tensor, sizes: Tensor) -> Tensor:
        return self.classes(self.pool(self.elements(points, sizes), mask=padding(lengths=sizes))[:, 0])

    def weights(self, points: Tensor, sizes: Tensor) -> Tensor:
        """Of the seed over the points, (batch, heads, n)."""
        lens = regard.lenses.Weights()
        seen = self.pool.observe(self.elements(points, sizes), lens, mask=padding(lengths=sizes))
        return seen.attention[lens][:, :, 0]


class Perceiver(nn.Module):
    """Two readings of the set with a block of latents behind each, and the mean of the latents."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(FEATURES, DIM), nn.LayerNorm(DIM))
        own = [
            TransformerBlock(
                Attention(Projections(DIM, HEADS)), FeedForward(DIM, DIM), lambda: PreNorm(nn.LayerNorm(DIM))
            )
            for _ in range(2)
        ]
        self.encode = PerceiverEncoder(POINTS, DIM, [(cross_block(PreNorm), [block]) for block in own])
        self.classes = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, MOST))

    def forward(self, points: Tensor, sizes: Tensor) -> Tensor:
        return self.classes(self.encode(self.embed(points), mask=padding(lengths=sizes)).mean(1))


def train(model: nn.Module, sets: tuple[Tensor, Tensor, Tensor], updates: int) -> None:
    """AdamW on random batches of 100, its rate falling to 0."""
    points, sizes, counts = sets
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for _ in range(updates):
        batch = torch.randint(len(counts), (100,))
        loss = nn.functional.cross_entropy(model(points[batch], sizes[batch]), counts[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train the three models, print the figures and return them."""
    parser = argparse.ArgumentParser(description="Count the clusters of a set.")
    parser.add_argument(
        "--picture", help="draw the weights of the seed over the points of a set here: .png, .svg, .pdf"
    )
    parser.add_argument("--updates", type=int, default=500, help="of each model")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    sets, unseen, larger = make_sets(20000, draw), make_sets(1000, draw), make_sets(1000, draw, 100, 100)
    reader = SetTransformer()
    models = {"mean pooling": MeanPooling(), "Set Transformer": reader, "Perceiver": Perceiver()}
    figures = {"larger class": float(unseen[2].bincount().max()) / len(unseen[2])}
    print(f"larger class {figures['larger class']:.1%}")
    print("                  20 to 40 points   100 points   parameters")
    for name, model in models.items():
        train(model, sets, options.updates)
        with torch.no_grad():
            for size, (points, sizes, counts) in (("", unseen), (", 100 points", larger)):
                figures[name + size] = float((model(points, sizes).argmax(1) == counts).float().mean())
        parameters = sum(one.numel() for one in model.parameters())
        figures[f"parameters, {name}"] = parameters
        print(f"{name:17}{figures[name]:15.1%}{figures[f'{name}, 100 points']:13.1%}{parameters:13,}")
    points, sizes, _ = larger
    with torch.no_grad():
        change = reader(points[:, torch.randperm(points.shape[1])], sizes) - reader(points, sizes)
        weights = reader.weights(unseen[0][:1], unseen[1][:1])[0, :, : int(unseen[1][0])]
    figures["change by a permutation"] = float(change.abs().max())
    print(f"a permutation changes no logit by more than {figures['change by a permutation']:.0e}")
    if options.picture:
        columns = [f"{number + 1}" for number in range(weights.shape[1])]
        rows = [f"head {number + 1}" for number in range(HEADS)]
        regard.plots.save(regard.plots.heatmap(weights, rows, columns, title="The seed's weights"), options.picture)
    return figures


if __name__ == "__main__":
    main()
