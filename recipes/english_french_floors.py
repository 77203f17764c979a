"""How well English-French translators translate: everyday sentences, captions and news, and what they copy.

    python recipes/english_french_floors.py --data DIR --checkpoint FOLDER --checkpoint OTHER

DIR has `tatoeba-eng-fra/eng-fra.tsv.gz`, of which the held-out pairs are taken, split as for the training,
`multi30k/test_2016_flickr.LANGUAGE.gz` and `flores200-devtest/devtest.LANGUAGE.gz`. Lines are translated whole, as by
`regard test`. For each text: BLEU, how long the translations are beside the references, in words, and which share of
them has 0.9 to 1.1 of the words of its own; then the challenge set of `recipes/copying_challenge.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import copying_challenge

from regard.translation.bleu import score
from regard.translation.corpus import ParallelText
from regard.translation.data_split import split
from regard.translation.settings import SplitSettings, TextFiles, TextTable
from regard.translation.translator import Translator


def everyday(data: Path) -> Mapping[str, ParallelText]:
    """The everyday sentences to train on, to validate on, and held out, by these parts."""
    text = ParallelText.read(TextTable(tsv=Path("tatoeba-eng-fra/eng-fra.tsv.gz")), data)
    return split(text, SplitSettings(validation=1500, test=1500))


def english_french(data: Path, part: str) -> ParallelText:
    """The text of two files, as "multi30k/val" of multi30k/val.en.gz and multi30k/val.fr.gz."""
    return ParallelText.read(TextFiles(source=Path(f"{part}.en.gz"), target=Path(f"{part}.fr.gz")), data)


def texts(data: Path) -> dict[str, ParallelText]:
    """The texts by name."""
    return {
        "everyday": everyday(data)["test"],
        "captions": english_french(data, "multi30k/test_2016_flickr"),
        "news": english_french(data, "flores200-devtest/devtest"),
    }


def report(translator: Translator, data: Path) -> Iterator[str]:
    """The lines of a translator's table, and those of what it copies."""
    yield "| text | sentences | BLEU | length | within 0.9 to 1.1 |"
    yield f"| --- |{' --- |' * 4}"
    for name, text in texts(data).items():
        said = [one.text for one in translator.translate(text.sources, observe=False)]
        words = [(len(one.split()), len(line.split())) for one, line in zip(said, text.targets, strict=True)]
        length = sum(one for one, _ in words) / sum(line for _, line in words)
        near = sum(0.9 <= one / line <= 1.1 for one, line in words) / len(words)
        scored = score(said, text.targets)
        yield f"| {name} | {len(text):,} | {scored.bleu:.1f} | {length:.2f} | {100 * near:.0f} % |"
    yield ""
    yield from copying_challenge.report(translator)
    yield ""
    yield scored.bleu_signature


def main() -> None:
    """Print a table for each translator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, action="append", required=True)
    arguments = parser.parse_args()
    for folder in arguments.checkpoint:
        sys.stdout.write(f"\n{folder.name}\n\n")
        for line in report(Translator.load(folder), arguments.data):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
