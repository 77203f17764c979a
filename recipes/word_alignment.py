"""Alignment error rate of links that are learned from text alone, on pairs with links by hand.

    python recipes/word_alignment.py --data DIR

DIR has `align-en-fr` (Hansards, Mihalcea and Pedersen 2003) and `align-ja-en` (Kyoto, Neubig 2011), each with its two
sides as `test.LANGUAGE.gz` and `test.gold.gz`, links from 1; and `tatoeba-eng-fra/eng-fra.tsv.gz`, more text to learn
English and French from. The Japanese pairs are all that there is for them.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from regard.heads import SentenceLinks, alignment_error_rate, diagonal_links, parse_pharaoh
from regard.translation.word_aligner import align_words

SETTINGS = {"as it is": {}, "whole words": {"stem": None}, "directions apart": {"together": False}}


def lines(path: Path) -> list[str]:
    """The lines of a compressed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def report(folder: Path, languages: Sequence[str], more: Sequence[Sequence[list[str]]]) -> None:
    """Print the error rate of each setting, and its CPU seconds."""
    source, target = ([line.split() for line in lines(folder / f"test.{language}.gz")] for language in languages)
    gold: list[SentenceLinks] = [parse_pharaoh(line, first=1) for line in lines(folder / "test.gold.gz")]
    sure, possible = [links.sure for links in gold], [links.possible for links in gold]
    pairs = len(source) + len(more[0])
    sys.stdout.write(f"\n{'-'.join(languages)}: {len(source)} pairs with links, learned from {pairs:,}\n")
    straight = [diagonal_links(len(s), len(t)) for s, t in zip(source, target, strict=True)]
    sys.stdout.write(f"the diagonal: {100 * alignment_error_rate(straight, sure, possible):.1f} %\n")
    for name, setting in SETTINGS.items():
        start = time.process_time()
        found = align_words([*source, *more[0]], [*target, *more[1]], **setting)[: len(source)]
        spent = time.process_time() - start
        rate = alignment_error_rate(found, sure, possible)
        sys.stdout.write(f"{name}: {100 * rate:.1f} %, {spent:.0f} CPU s\n")


def main(data: Path) -> None:
    """Print all of both languages."""
    rows = [line.split("\t") for line in lines(data / "tatoeba-eng-fra" / "eng-fra.tsv.gz")]
    report(data / "align-en-fr", ("en", "fr"), ([], []))
    report(data / "align-en-fr", ("en", "fr"), tuple([row[side].split() for row in rows] for side in (0, 1)))
    report(data / "align-ja-en", ("ja", "en"), ([], []))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    main(arguments.parse_args().data)
