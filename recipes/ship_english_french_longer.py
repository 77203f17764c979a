"""Export the translator of `regard translate`, from a run of `english-french-longer.yaml`.

    python recipes/ship_english_french_longer.py --data DIR

Averages the last weights of the run and exports them in bfloat16 to src/regard_models/english_french_longer, chooses
the heads that link words there, calibrates how far its translations can be trusted, and writes the model card with the
scores of `recipes/english_french_floors.py`. DIR has the texts of that recipe, and all of Multi30k. What it learned
from is for non-commercial research, and so is what this makes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from string import Template

import english_french_floors
import trust
from ship_english_french import progress_fields, weight_fields, write_card

from regard.errors import ConfigurationError
from regard.translation.checkpoint import load_weights
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH_LONGER, RunFolder, average, export
from regard.translation.settings import TextTable
from regard.translation.translator import Translator
from regard.translation.word_aligner import align_words

CARD = Path(__file__).with_name("english_french_longer.md")
RECIPE = Path(__file__).with_name("english-french-longer.yaml")
WHERE_AND_HOW_LONG = {"data.folder", "training.start_from", "training.max_minutes"}
"""Keys in which a run may differ from the recipe."""
LINKED = 1024
"""Pairs whose links choose the head."""


def main() -> None:
    """Average, export, choose, calibrate, score, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/english-french-longer"), help="folder of the run")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--last", type=int, default=3, help="how many of the last weights are averaged")
    arguments = parser.parse_args()
    run, recipe = RunFolder(arguments.run), Experiment.load(RECIPE)
    other = set(recipe.differences(Experiment.load(run.experiment))) - WHERE_AND_HOW_LONG
    if other:
        raise ConfigurationError(f"{run.path} is no run of {RECIPE}: it differs in {', '.join(sorted(other))}")
    average(run.path, last=arguments.last)
    folder = export(run.path, ENGLISH_FRENCH_LONGER, which="average")
    recipe.save(RunFolder(folder).experiment)
    choose_alignment(folder, arguments.data)
    trust.main(arguments.data, folder)
    table = "\n".join(english_french_floors.report(Translator.load(folder), arguments.data))
    card = Template(CARD.read_text("utf-8")).substitute(fields(run, folder, recipe), table=table)
    write_card(folder, card)


def choose_alignment(folder: Path, data: Path) -> None:
    """Choose the head that links the words of everyday sentences as the text alone does, and keep the choice."""
    text = ParallelText.read(TextTable(tsv=Path("tatoeba-eng-fra/eng-fra.tsv.gz")), data)
    links = align_words(*([line.split() for line in side] for side in (text.sources, text.targets)))
    some = slice(LINKED)
    Translator.load(folder).choose_alignment(text.sources[some], text.targets[some], links[some]).save(folder)


def fields(run: RunFolder, folder: Path, recipe: Experiment) -> dict[str, object]:
    """Fields of the model card about the model and its training."""
    header = load_weights(RunFolder(folder).best)[1]
    return {
        **{name: getattr(recipe.model, name) for name in ("encoder_layers", "decoder_layers", "dim", "num_heads")},
        **weight_fields(folder),
        **progress_fields(run, ""),
        "means": ", ".join(f"{update:,}" for update in header["averaged_updates"]),
        "seed": recipe.seed,
        "batch_tokens": f"{recipe.training.batch_tokens:,}",
    }


if __name__ == "__main__":
    main()
