"""The drawing of docs/transformer.md: encoder and decoder of the English-French translator, with its own shapes.

    python recipes/transformer_drawing.py FILE.svg

Boxes let the page through and lines are grey, so that dark letters read on a light page, and light ones on a dark page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN

SOURCE, TARGET = "I am very tired.", "Je suis très fatigué."
WIDTH, LEFT, RIGHT, COLUMN, HEIGHT = 500, 22, 268, 210, 34
ATTENTION, FEED_FORWARD, NORM, WORDS = "#3b82c4", "#d9822b", "#808080", "#4f9d69"
OPACITY = 0.25
"""Of a box."""
LINE = "#808080"


@dataclass
class Drawing:
    """Boxes and arrows, from the bottom to the top."""

    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, text: str, fill: str, *, height: float = HEIGHT, second: str = "") -> None:
        """A box with one or two lines of text; y is its upper edge."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{COLUMN}" height="{height}" rx="6" fill="{fill}" fill-opacity="{OPACITY}"/>'
        )
        lines = [text, second] if second else [text]
        for number, line in enumerate(lines):
            at = y + height / 2 + 5 + 17 * (number - (len(lines) - 1) / 2)
            self.parts.append(f'<text x="{x + COLUMN / 2}" y="{at}" text-anchor="middle">{escape(line)}</text>')

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """A line through points, with an arrow at its end."""
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        end = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.6"{end}/>')

    def frame(self, x: float, y: float, height: float, text: str) -> None:
        """A frame around a block, and how often it is there, in a gap of the frame."""
        left, right, lower = x - 14, x + COLUMN + 14, y + height
        path = (
            f"M{x + 78} {y} H{right - 10} q10 0 10 10 V{lower - 10} q0 10 -10 10 "
            f"H{left + 10} q-10 0 -10 -10 V{y + 10} q0 -6 4 -8"
        )
        self.parts.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-dasharray="5 4"/>')
        self.parts.append(
            f'<rect x="{x - 10}" y="{y - 12}" width="88" height="24" rx="12" fill="{NORM}" fill-opacity="{OPACITY}"/>'
        )
        self.parts.append(f'<text x="{x + 34}" y="{y + 5}" text-anchor="middle">{escape(text)}</text>')

    def svg(self, upper: float, lower: float, title: str) -> str:
        """The file, from the upper to the lower edge."""
        height = lower - upper
        marker = (
            '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 {upper:g} {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" role="img" font-family="system-ui, sans-serif" font-size="14" fill="#1b1b1f">\n'
            f"<title>{escape(title)}</title>\n<defs>{marker}</defs>\n{body}\n</svg>\n"
        )


def stack(drawing: Drawing, x: float, bottom: float, sublayers: list[tuple[str, str, str]]) -> float:
    """Sublayers with their residual paths, upwards from `bottom`; returns the upper edge of the last norm."""
    middle, side, y = x + COLUMN / 2, x - 7, bottom
    for text, second, fill in sublayers:
        height = 48
        drawing.line((middle, y), (middle, y - 18))
        drawing.line((middle, y - 6), (side, y - 6), (side, y - 18 - height - 14 - 13), (x, y - 18 - height - 14 - 13))
        drawing.box(x, y - 18 - height, text, fill, height=height, second=second)
        drawing.line((middle, y - 18 - height), (middle, y - 18 - height - 14))
        y -= 18 + height + 14 + 26
        drawing.box(x, y, "add, norm", NORM, height=26)
    return y


def draw(model: Any, source: int, target: int) -> str:
    """The drawing of a model for so many tokens of source and target."""
    block = model.decoder.blocks[0]
    projections, up = block.attention.projections, block.feed_forward.up
    dim, heads = up.in_features, projections.num_heads
    vocabulary = model.target_embedding.tokens.num_embeddings
    feed = ("feed-forward", f"{dim} → {up.out_features} → {dim}", FEED_FORWARD)
    of_heads = f"{heads} heads of {dim // heads}"
    drawing, base, top = Drawing(), 722.0, 0.0
    for x, name, count, first in (
        (LEFT, "source", source, ("self-attention", of_heads, ATTENTION)),
        (RIGHT, "target so far", target, ("causal self-attention", of_heads, ATTENTION)),
    ):
        drawing.box(x, base, f"{name}: {count} tokens", WORDS)
        drawing.line((x + COLUMN / 2, base), (x + COLUMN / 2, base - 16))
        drawing.box(x, base - 64, "√d · embedding + position", WORDS, height=48, second=f"({count}, {dim})")
        cross = [("cross-attention", f"{of_heads}, weights ({target}, {source})", ATTENTION)] if x == RIGHT else []
        top = stack(drawing, x, base - 64, [first, *cross, feed])
        blocks = len((model.decoder if cross else model.encoder).blocks)
        drawing.frame(x, top - 12, base - 64 - top + 2, f"{blocks} blocks")
        if cross:
            drawing.line((x + COLUMN / 2, top), (x + COLUMN / 2, top - 28))
            drawing.box(x, top - 76, "softmax(E x): next word", WORDS, height=48, second=f"({target}, {vocabulary:,})")
        else:
            over, between = base - 64 - 106 - 18 - 24, (LEFT + COLUMN + RIGHT) / 2 + 2  # cross-attention, its left
            out = (x + COLUMN / 2, top), (x + COLUMN / 2, top - 34)
            drawing.line(*out, (between, top - 34), (between, over), (RIGHT, over))
    title = "A Transformer: encoder, decoder and cross-attention, with the shapes of its tensors"
    return drawing.svg(top - 84, base + HEIGHT + 8, title)


def main() -> None:
    """Draw."""
    translator = Translator.load(ENGLISH_FRENCH)
    model: Any = translator.model
    source, target = translator.source_vocabulary.encode(SOURCE), translator.target_vocabulary.encode(TARGET)
    target = [BEGIN, *target]
    with torch.no_grad():  # the shapes are those that it computes with
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([target]))
    assert logits.shape[1] == len(target)
    Path(sys.argv[1]).write_text(draw(model, len(source), logits.shape[1]), encoding="utf-8")


if __name__ == "__main__":
    main()
