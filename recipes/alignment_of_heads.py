"""Alignment error rate of each head of the English-French translator, on short sentences with gold links.

    python recipes/alignment_of_heads.py --data DIR

DIR has `test.en.gz`, `test.fr.gz` and `test.gold.gz`: the Hansards of Mihalcea and Pedersen 2003, links in Pharaoh's
format from 1, with p for possible ones. Each French word is linked to the English one with the largest weight, read at
the step that predicts the word, and at the next step, whose input it is.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from regard.heads import SentenceLinks, alignment_error_rate, diagonal_links, parse_pharaoh, word_links
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

MOST_WORDS = 10


def lines(path: Path) -> list[str]:
    """The lines of a compressed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def next_step_links(translator: Translator, source: str, target: str, weights: Tensor) -> list[tuple[int, int]]:
    """Links of all words but the last, from the weights of the step after each token."""
    source_words, target_words = (
        vocabulary.words(vocabulary.encode(line))
        for vocabulary, line in ((translator.source_vocabulary, source), (translator.target_vocabulary, target))
    )
    return word_links(weights[1:], source_words, target_words[:-1])


def main(folder: Path) -> None:
    """Print the error rate of the diagonal, and two of each head: at the step of the word, and at the next."""
    rows = zip(*(lines(folder / f"test.{part}.gz") for part in ("en", "fr", "gold")), strict=True)
    rows = [row for row in rows if max(len(side.split()) for side in row[:2]) <= MOST_WORDS]
    source, target = ([row[side] for row in rows] for side in (0, 1))
    gold: Sequence[SentenceLinks] = [parse_pharaoh(row[2], first=1) for row in rows]
    sure, possible = [links.sure for links in gold], [links.possible for links in gold]

    def rate(links: Sequence[list[tuple[int, int]]]) -> str:
        return f"{100 * alignment_error_rate(links, sure, possible):.1f} %"

    translator = Translator.load(ENGLISH_FRENCH)
    words = sum(len(side.split()) for side in target)
    straight = [diagonal_links(*(len(side.split()) for side in row[:2])) for row in rows]
    sys.stdout.write(f"{len(rows)} sentences, {words} French words; diagonal {rate(straight)}\n")
    for layer, block in enumerate(translator.model.decoder.blocks):
        predicted, read = [], []
        for head in range(block.cross_attention.projections.num_heads):
            pairs = translator.align(source, target, layer=layer, head=head)
            predicted.append(rate([list(pair.links) for pair in pairs]))
            following = [
                next_step_links(translator, *sides, pair.weights)
                for *sides, pair in zip(source, target, pairs, strict=True)
            ]
            read.append(rate(following))
        for step, rates in (("its step", predicted), ("the next", read)):
            sys.stdout.write(f"layer {layer}, at {step}, heads 0 to {len(rates) - 1}: {', '.join(rates)}\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    main(arguments.parse_args().data)
