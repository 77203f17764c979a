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
import sys
from pathlib import Path

import english_french_floors

from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator
from regard.translation.trust import LOW

CUT = 0.6
"""A translation of fewer words than this share of the reference was cut short."""
NAMES = {
    "everyday": "everyday sentences (Tatoeba)",
    "captions": "captions (Multi30k, test_2016)",
    "news": "news (FLORES-200, devtest)",
}
"""What the texts are called in the table."""


def main(data: Path, folder: Path) -> None:
    """Calibrate, and print what the warnings find."""
    translator = Translator.load(folder)
    known = (
        english_french_floors.everyday(data)["validation"],
        english_french_floors.english_french(data, "multi30k/val"),
        english_french_floors.english_french(data, "align-en-fr/test"),
    )
    translations = translator.translate([line for text in known for line in text.sources], observe=False)
    trust = translator.calibrate(translations, [line for text in known for line in text.targets])
    trust.save(folder)
    sys.stdout.write(f"calibrated on {trust.pairs:,} pairs, correlation {trust.correlation:.3f}\n\n")
    sys.stdout.write(
        "| text | sentences | with a warning | cut short | of these with a warning |\n| --- |" + " --- |" * 4 + "\n"
    )
    for name, text in english_french_floors.texts(data).items():
        found = translator.translate(text.sources, observe=False)
        low = [one.trust is not None and one.trust < LOW for one in found]
        cut = [len(one.text.split()) < CUT * len(line.split()) for one, line in zip(found, text.targets, strict=True)]
        told = sum(a and b for a, b in zip(low, cut, strict=True))
        shares = [f"{100 * sum(low) / len(low):.1f} %", f"{sum(cut):,}", f"{100 * told / max(1, sum(cut)):.1f} %"]
        sys.stdout.write(f"| {NAMES[name]} | {len(found):,} | {' | '.join(shares)} |\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--checkpoint", type=Path, default=ENGLISH_FRENCH, help="folder of the translator")
    given = arguments.parse_args()
    main(given.data, given.checkpoint)
