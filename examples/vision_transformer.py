"""A small Vision Transformer: does its attention lie on the object, and which of its maps does?

    pip install scikit-learn
    python examples/vision_transformer.py [--picture maps.png]

A picture of 20 × 20 pixels is cut into 25 patches of 4 × 4. Each becomes a vector by one linear map, plus a learned
embedding of its place; a class token stands before them, and its last vector is classified (Dosovitskiy et al. 2021).
Two encoder blocks of 4 heads. The maps of the class token c on the patches j, all without its weight on itself:

    layer l   mean over heads of softmax_j(q_c · k_j / √12), which is what is drawn most often, for the last layer
    rollout   row c of Â_2 Â_1,  Â_l = (mean over heads of A_l + I) / 2         Abnar and Zuidema 2020

The digits are real: 1,797 handwritten ones of 8 × 8 pixels, which scikit-learn ships (Alpaydin and Kaynak 1998); 1,300
are for training. Each is put on one of 16 places of an empty picture, with 6 pieces of 4 × 4 of other digits as
clutter, so that the place of the object is known: 4 of 25 patches. Trained on digits' classes alone.

Printed: accuracy on 994 pictures of the other 497 digits (standard error 1 %), beside logistic regression on all pixels
and on the digit alone, cut out as if its place were known; the share of each map on the digit, beside equal weights and
weights in proportion to ink, since clutter is ink too; and accuracy when the 4 patches with the most weight in a map
are made blank, beside the 4 with the most ink and 4 at random: a map may lie on the digit while the decision depends on
something else.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.nn import Attention, FeedForward, PreNorm, Projections, TransformerBlock
from regard.positions import Learned

SIZE, PATCH, DIGIT, CLUTTER, DIM, HEADS = 20, 4, 8, 6, 48, 4
PATCHES = (SIZE // PATCH) ** 2
HIDDEN = (DIGIT // PATCH) ** 2
"""How many patches a digit has, and how many are made blank."""


def load_digits() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn, (1797, 8, 8) from 0 to 1, and their classes, in random order."""
    try:
        from sklearn import datasets
    except ImportError:
        raise SystemExit("scikit-learn is not installed: pip install scikit-learn") from None
    digits: Any = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.images, dtype=torch.float32)[order] / 16, torch.tensor(digits.target)[order]


def paste(pictures: Tensor, pieces: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write a square piece (count, n, n) into each picture (count, 20, 20), with its corner at (row, column)."""
    pixels = torch.arange(pieces.shape[-1])
    places = (rows[:, None, None] + pixels[:, None]) * SIZE + columns[:, None, None] + pixels
    pictures.flatten(1).scatter_(1, places.flatten(1), pieces.flatten(1))


def make_pictures(digits: Tensor, clutter: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """A picture of each digit with pieces of `clutter`, and where the digit is: both (count, 20, 20)."""
    count = len(digits)
    pictures, inside = torch.zeros(count, SIZE, SIZE), torch.zeros(count, SIZE, SIZE)
    for _ in range(CLUTTER):
        sources = clutter[torch.randint(len(clutter), (count,), generator=draw)]
        row, column = torch.randint(DIGIT - PATCH + 1, (2,), generator=draw).tolist()
        corners = torch.randint(SIZE - PATCH + 1, (2, count), generator=draw)
        paste(pictures, sources[:, row : row + PATCH, column : column + PATCH], *corners)
    corners = PATCH * torch.randint((SIZE - DIGIT) // PATCH + 1, (2, count), generator=draw)
    paste(pictures, digits, *corners)
    paste(inside, torch.ones_like(digits), *corners)
    return pictures, inside


def patches(pictures: Tensor) -> Tensor:
    """(count, 20, 20) as (count, 25, 16)."""
    return pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)


def encoder_block() -> TransformerBlock:
    """One block of the encoder, with the norm before each part."""
    attention = Attention(Projections(DIM, HEADS))
    return TransformerBlock(attention, FeedForward(DIM, 4 * DIM), lambda: PreNorm(nn.LayerNorm(DIM)))


class VisionTransformer(nn.Module):
    """Logits of the ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Linear(PATCH * PATCH, DIM), Learned(PATCHES + 1, DIM)
        self.class_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.first, self.last = encoder_block(), encoder_block()
        self.classes = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10))

    def tokens(self, pictures: Tensor) -> Tensor:
        """The class token and the patches of each picture, (count, 26, 48)."""
        embedded = self.embedding(patches(pictures))
        tokens = torch.cat([self.class_token.expand(len(pictures), -1, -1), embedded], 1)
        return tokens + self.positions(torch.arange(PATCHES + 1))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classes(self.last(self.first(self.tokens(pictures)))[:, 0])

    def maps(self, pictures: Tensor) -> dict[str, Tensor]:
        """Weights of the class token on the patches, by each map, (count, 25), with the sum 1."""
        lens = regard.lenses.Weights()
        first = self.first.observe(self.tokens(pictures), lens)
        last = self.last.observe(first.output, lens)
        layers = [first.attention[lens], last.attention[lens]]  # each [count, heads, 26, 26]
        rollout = regard.heads.attention_rollout(layers)
        rows = {"first layer": layers[0].mean(1), "last layer": layers[1].mean(1), "rollout": rollout}
        return {name: row[:, 0, 1:] / row[:, 0, 1:].sum(1, keepdim=True) for name, row in rows.items()}


def train(model: VisionTransformer, digits: Tensor, classes: Tensor, draw: torch.Generator, updates: int) -> None:
    """AdamW on 64 new pictures in each update."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.005, total_steps=updates)
    for _ in range(updates):
        batch = torch.randint(len(digits), (64,), generator=draw)
        pictures, _ = make_pictures(digits[batch], digits, draw)
        loss = nn.functional.cross_entropy(model(pictures), classes[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def logistic_regression(inputs: Tensor, classes: Tensor, unseen: Tensor, wanted: Tensor) -> float:
    """The accuracy on `unseen` of scikit-learn's logistic regression; with a smaller tolerance it is no better."""
    from sklearn.linear_model import LogisticRegression

    classifier = LogisticRegression(max_iter=200, tol=0.001).fit(inputs.flatten(1).numpy(), classes.numpy())
    return float(classifier.score(unseen.flatten(1).numpy(), wanted.numpy()))


def blank(pictures: Tensor, weights: Tensor) -> Tensor:
    """The pictures without the 4 patches of the largest weights (count, 25)."""
    grid = torch.ones_like(weights).scatter(1, weights.topk(HIDDEN).indices, 0.0).unflatten(1, (SIZE // PATCH, -1))
    return pictures * grid.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print the figures and return them."""
    parser = argparse.ArgumentParser(description="A Vision Transformer, and whether its maps lie on the object.")
    parser.add_argument("--updates", type=int, default=400, help="of the training")
    parser.add_argument("--picture", help="lay the maps of four pictures over them here: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    digits, classes = load_digits()
    seen, known, others, wanted = digits[:1300], classes[:1300], digits[1300:].repeat(2, 1, 1), classes[1300:].repeat(2)
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    model = VisionTransformer()
    train(model, seen, known, draw, options.updates)

    pictures, inside = make_pictures(others, seen, draw)
    many, _ = make_pictures(seen.repeat(20, 1, 1), seen, draw)  # as many as the Transformer saw
    with torch.no_grad():
        maps = model.maps(pictures)
        ink = patches(pictures).sum(2)
        accuracy = {"Vision Transformer": model(pictures)}
        for name, weights in {**maps, "ink": ink, "chance": torch.rand(ink.shape, generator=draw)}.items():
            accuracy[f"4 patches blank by {name}"] = model(blank(pictures, weights))
    figures = {name: float((logits.argmax(1) == wanted).float().mean()) for name, logits in accuracy.items()}
    figures["logistic regression"] = logistic_regression(many, known.repeat(20), pictures, wanted)
    figures["logistic regression, place known"] = logistic_regression(seen, known, others, wanted)
    on_digit = patches(inside).mean(2)
    maps |= {"ink": ink / ink.sum(1, keepdim=True), "equal weights": torch.full_like(ink, 1 / PATCHES)}
    figures |= {f"on the digit, {name}": float((weights * on_digit).sum(1).mean()) for name, weights in maps.items()}
    print(f"{'':34}accuracy")
    for name in ("Vision Transformer", "logistic regression", "logistic regression, place known"):
        print(f"{name:34}{figures[name]:8.1%}")
    print(f"{'':34}on the digit  accuracy without its 4 patches")
    for name in maps:
        without = figures[f"4 patches blank by {'chance' if name == 'equal weights' else name}"]
        print(f"{name:34}{figures[f'on the digit, {name}']:12.2f}{without:32.1%}")
    if options.picture:
        draw_maps(pictures[:4], inside[:4], maps, options.picture)
    return figures


def draw_maps(pictures: Tensor, inside: Tensor, maps: dict[str, Tensor], path: str) -> None:
    """Rows of pictures, and columns of maps laid over them; a frame is around the digit."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    names = ["first layer", "last layer", "rollout"]
    figure = Figure(figsize=(7.2, 7.6), layout="constrained")
    table = figure.subplots(len(pictures), 1 + len(names))
    for number, row in enumerate(table):
        (top, left), *_ = inside[number].nonzero().tolist()
        for axes, name in zip(row, ["picture", *names], strict=True):
            axes.imshow(pictures[number].numpy(), cmap="gray", extent=(0, SIZE, SIZE, 0))
            if name != "picture":
                weights = maps[name][number].unflatten(0, (SIZE // PATCH, -1))
                axes.imshow(weights.numpy(), cmap="inferno", alpha=0.6, vmin=0, extent=(0, SIZE, SIZE, 0))
            axes.add_patch(Rectangle((left, top), DIGIT, DIGIT, fill=False, edgecolor="cyan", linewidth=1.5))
            axes.set(xticks=[], yticks=[], title=name if number == 0 else "")
    regard.plots.save(figure, path)


if __name__ == "__main__":
    main()
