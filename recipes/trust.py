"""How far an English-French translator can be trusted, by default that which regard comes with: calibrate, and measure.

    python recipes/trust.py --data DIR
    python recipes/trust.py --data DIR --checkpoint FOLDER

DIR has `tatoeba-eng-fra/eng-fra.tsv.gz`, of which held-out pairs are taken, split as for the training, Multi30k's
captions as `multi30k/PART.LANGUAGE.gz`, the debates of Hansards as `align-en-fr/test.LANGUAGE.gz` and news as
`flores200-devtest/devtest.LANGUAGE.gz`. Calibrated on the validation halves, and on the debates, which these
translators cannot translate; that is kept in the model's folder. Measured on the test halves and the news: how many
sentences get a warning, and how many of those whose translation was cut short.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path

from regard.translation.corpus import ParallelText
from regard.translation.data_split import split
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH, RunFolder
from regard.translation.translator import Translator
from regard.translation.trust import LOW

CUT = 0.6
"""A translation of fewer words than this share of the reference was cut short."""


def both(folder: Path, part: str) -> tuple[list[str], list[str]]:
    """A part of a text, English and French."""
    english, french = (gzip.decompress((folder / f"{part}.{code}.gz").read_bytes()) for code in ("en", "fr"))
    return english.decode("utf-8").splitlines(), french.decode("utf-8").splitlines()


def main(data: Path, folder: Path) -> None:
    """Calibrate, and print what the warnings find."""
    experiment = Experiment.load(
        RunFolder(ENGLISH_FRENCH).experiment, [f"data.train.tsv={data / 'tatoeba-eng-fra' / 'eng-fra.tsv.gz'}"]
    )
    assert experiment.data.split is not None
    held_out = split(ParallelText.read(experiment.data.train, experiment.data.folder), experiment.data.split)
    translator = Translator.load(folder)
    everyday, captions, debates = (
        held_out["validation"],
        both(data / "multi30k", "val"),
        both(data / "align-en-fr", "test"),
    )
    translations = translator.translate([*everyday.sources, *captions[0], *debates[0]], observe=False)
    trust = translator.calibrate(translations, [*everyday.targets, *captions[1], *debates[1]])
    trust.save(folder)
    sys.stdout.write(f"calibrated on {trust.pairs:,} pairs, correlation {trust.correlation:.3f}\n\n")
    sys.stdout.write(
        "| text | sentences | with a warning | cut short | of these with a warning |\n| --- |" + " --- |" * 4 + "\n"
    )
    tests = {
        "everyday sentences (Tatoeba)": (held_out["test"].sources, held_out["test"].targets),
        "captions (Multi30k, test_2016)": both(data / "multi30k", "test_2016_flickr"),
        "news (FLORES-200, devtest)": both(data / "flores200-devtest", "devtest"),
    }
    for name, (sources, targets) in tests.items():
        found = translator.translate(sources, observe=False)
        low = [one.trust is not None and one.trust < LOW for one in found]
        cut = [len(one.text.split()) < CUT * len(line.split()) for one, line in zip(found, targets, strict=True)]
        told = sum(a and b for a, b in zip(low, cut, strict=True))
        shares = [f"{100 * sum(low) / len(low):.1f} %", f"{sum(cut):,}", f"{100 * told / max(1, sum(cut)):.1f} %"]
        sys.stdout.write(f"| {name} | {len(found):,} | {' | '.join(shares)} |\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--checkpoint", type=Path, default=ENGLISH_FRENCH, help="folder of the translator")
    given = arguments.parse_args()
    main(given.data, given.checkpoint)
