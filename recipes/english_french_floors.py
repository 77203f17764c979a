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
from pathlib import Path

import copying_challenge

from regard.translation.bleu import score
from regard.translation.corpus import ParallelText
from regard.translation.data_split import split
from regard.translation.settings import SplitSettings, TextFiles, TextTable
from regard.translation.translator import Translator


def texts(data: Path) -> dict[str, ParallelText]:
    """The texts by name."""
    everyday = ParallelText.read(TextTable(tsv=Path("tatoeba-eng-fra/eng-fra.tsv.gz")), data)
    files = {"captions": "multi30k/test_2016_flickr.{}.gz", "news": "flores200-devtest/devtest.{}.gz"}
    return {
        "everyday": split(everyday, SplitSettings(validation=1500, test=1500))["test"],
        **{
            name: ParallelText.read(TextFiles(source=Path(file.format("en")), target=Path(file.format("fr"))), data)
            for name, file in files.items()
        },
    }


def main() -> None:
    """Print a table for each translator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, action="append", required=True)
    parser.add_argument("--which", default="best", choices=("best", "last", "average"))
    arguments = parser.parse_args()
    for folder in arguments.checkpoint:
        which = arguments.which if (folder / f"{arguments.which}.safetensors").exists() else "best"
        translator = Translator.load(folder, which)
        sys.stdout.write(
            f"\n{folder.name}\n\n| text | sentences | BLEU | length | within 0.9 to 1.1 |\n| --- |{' --- |' * 4}\n"
        )
        for name, text in texts(arguments.data).items():
            said = [one.text for one in translator.translate(text.sources, observe=False)]
            scored = score(said, text.targets)
            words = [(len(one.split()), len(line.split())) for one, line in zip(said, text.targets, strict=True)]
            whole = sum(one for one, _ in words) / sum(line for _, line in words)
            near = sum(0.9 <= one / line <= 1.1 for one, line in words) / len(words)
            sys.stdout.write(f"| {name} | {len(text):,} | {scored.bleu:.1f} | {whole:.2f} | {100 * near:.0f} % |\n")
            sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.writelines(f"{line}\n" for line in copying_challenge.report(translator))
        sys.stdout.write(f"\n{scored.bleu_signature}\n")


if __name__ == "__main__":
    main()
