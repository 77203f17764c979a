"""What teaching one head of the English-French translator by links of the text alone does to its alignment.

    python recipes/taught_head.py --data DIR

DIR has `tatoeba-eng-fra/eng-fra.tsv.gz`, everyday sentences, and `align-en-fr`, the Hansards with links by hand. Links
are learned from 30,000 everyday sentences and taught on all of them but 500; on these the head is compared with the
links of the text, and on the Hansards with those by hand.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from regard.heads import alignment_error_rate, parse_pharaoh
from regard.heads.word_alignment import Link
from regard.translation.bleu import score
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.word_aligner import align_words

PAIRS, HELD_OUT, TRANSLATED = 30_000, 500, 300


def lines(path: Path) -> list[str]:
    """The lines of a compressed file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def error_rate(
    translator: Translator,
    pairs: tuple[Sequence[str], Sequence[str]],
    sure: Sequence[Collection[Link]],
    possible: Sequence[Collection[Link]],
) -> str:
    """The error rate of the head that the translator aligns by, in percent."""
    found = [pair.links for pair in translator.align(*pairs)]
    return f"{100 * alignment_error_rate(found, sure, possible):.1f} %"


def main(data: Path) -> None:
    """Print error rates and BLEU before and after."""
    torch.set_num_threads(1)
    rows = [line.split("\t")[:2] for line in lines(data / "tatoeba-eng-fra" / "eng-fra.tsv.gz")]
    random.Random(0).shuffle(rows)
    english, french = ([row[side] for row in rows[:PAIRS]] for side in (0, 1))
    hansards = lines(data / "align-en-fr" / "test.en.gz"), lines(data / "align-en-fr" / "test.fr.gz")
    gold = [parse_pharaoh(line, first=1) for line in lines(data / "align-en-fr" / "test.gold.gz")]
    links = align_words([line.split() for line in english], [line.split() for line in french])
    translator = Translator.load(ENGLISH_FRENCH)

    def report(name: str) -> None:
        held = english[-HELD_OUT:], french[-HELD_OUT:]
        everyday = error_rate(translator, held, links[-HELD_OUT:], links[-HELD_OUT:])
        by_hand = error_rate(translator, hansards, [one.sure for one in gold], [one.possible for one in gold])
        said = [one.text for one in translator.translate(held[0][:TRANSLATED], observe=False)]
        bleu = score(said, held[1][:TRANSLATED]).bleu
        sys.stdout.write(f"{name}: everyday {everyday}, Hansards {by_hand}, BLEU of {TRANSLATED} everyday {bleu:.1f}\n")
        sys.stdout.flush()

    report("before")
    start = time.process_time()
    translator.teach_alignment(english[:-HELD_OUT], french[:-HELD_OUT], links[:-HELD_OUT])
    report(f"after {time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    main(arguments.parse_args().data)
