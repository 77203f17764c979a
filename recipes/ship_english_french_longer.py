"""Export the translator of `regard translate`, from the three trainings of `english-french-longer.yaml`.

    python recipes/ship_english_french_longer.py --data DIR

Averages the last weights of the last training, mixes them with those of the first, which translates everyday sentences
best, and exports them in bfloat16 to src/regard_models/english_french_longer. It chooses the heads that link words,
calibrates how far its translations can be trusted, and writes the model card with the scores of
`recipes/english_french_floors.py`. DIR has the texts of that recipe, and all of Multi30k. What it learned from is for
non-commercial research, and so is what this makes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from string import Template

import english_french_floors
import trust
from ship_english_french import weight_fields, write_card
from torch import Tensor

from regard.errors import ConfigurationError
from regard.translation.checkpoint import load_weights, read_header, save_tensors
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH_LONGER, RunFolder, average, export
from regard.translation.settings import TextTable
from regard.translation.translator import Translator
from regard.translation.word_aligner import align_words

CARD = Path(__file__).with_name("english_french_longer.md")
RECIPE = Path(__file__).with_name("english-french-longer.yaml")
TEXTS = ("english-french-text", "english-french-built-text", "english-french-last-text")
"""What each training reads: the folder that the recipe of this name writes."""
KEYS = "start_from max_minutes max_updates learning_rate warmup_steps validate_every precision"
DIFFERENT = {"data.folder", *(f"training.{key}" for key in KEYS.split())}
"""Keys in which a training may differ from the recipe."""
LINKED = 1024
"""Pairs whose links choose the head."""


def main() -> None:
    """Average, export, choose, calibrate, score, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = [Path("runs") / name for name in ("english-french-longer", "english-french-built", "english-french-last")]
    parser.add_argument("--runs", type=Path, nargs=len(TEXTS), default=runs, help="folders of the trainings, in order")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--last", type=int, default=3, help="how many of the last weights are averaged")
    parser.add_argument("--first", type=float, default=0.3, help="share of the weights of the first training")
    arguments = parser.parse_args()
    recipe = Experiment.load(RECIPE)
    check_runs(arguments.runs, recipe)
    mix(average(arguments.runs[-1], last=arguments.last), started_from(arguments.runs[1]), arguments.first)
    trained = training_fields(arguments.runs)
    folder = export(arguments.runs[-1], ENGLISH_FRENCH_LONGER, which="average")
    recipe.save(RunFolder(folder).experiment)
    choose_alignment(folder, arguments.data)
    trust.main(arguments.data, folder)
    table = "\n".join(english_french_floors.report(Translator.load(folder), arguments.data))
    card = Template(CARD.read_text("utf-8")).substitute(trained | model_fields(folder, recipe), table=table)
    write_card(folder, card)


def check_runs(runs: Sequence[Path], recipe: Experiment) -> None:
    """Check that each training follows the recipe, has its text, and goes on from the one before."""
    for run, text, before in zip(runs, TEXTS, (None, *runs), strict=False):
        trained = Experiment.load(RunFolder(run).experiment)
        other = set(recipe.differences(trained)) - DIFFERENT
        if other:
            raise ConfigurationError(f"{run} is no run of {RECIPE}: it differs in {', '.join(sorted(other))}")
        if trained.data.folder.name != text:
            raise ConfigurationError(f"{run} has read {trained.data.folder}, and the text of this training is {text}")
        start = trained.training.start_from
        if before and (start is None or start.parent.resolve() != before.resolve()):
            raise ConfigurationError(f"{run} starts from {start}, and needs to go on from weights in {before}")


def choose_alignment(folder: Path, data: Path) -> None:
    """Choose the head that links the words of everyday sentences as the text alone does, and keep the choice."""
    text = ParallelText.read(TextTable(tsv=Path("tatoeba-eng-fra/eng-fra.tsv.gz")), data)
    links = align_words(*([line.split() for line in side] for side in (text.sources, text.targets)))
    some = slice(LINKED)
    Translator.load(folder).choose_alignment(text.sources[some], text.targets[some], links[some]).save(folder)


def started_from(run: Path) -> Path:
    """The weights that a training goes on from."""
    start = Experiment.load(RunFolder(run).experiment).training.start_from
    if start is None:
        raise ConfigurationError(f"{run} starts from nothing, and needs to go on from weights")
    return start


def mix(weights: Path, first: Path, share: float) -> None:
    """Mix weights with a share of others, whose tables of embeddings may lack the last tokens: these stay as they are.

    Source: Wortsman et al. 2022 (arXiv 2109.01903), equation 2, who mix weights of before and after a training so.
    """
    tensors, header = load_weights(weights)
    others = load_weights(first)[0]
    mixed: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        rows = slice(len(others[name]))
        both = tensor.double()
        both[rows] = (1 - share) * both[rows] + share * others[name].double()
        mixed.setdefault(id(tensor), both.to(tensor.dtype))
    save_tensors({name: mixed[id(tensor)] for name, tensor in tensors.items()}, weights, header | {"mixed": share})


def training_fields(runs: Sequence[Path]) -> dict[str, str]:
    """Fields of the model card about the trainings: the updates of the weights that each hands on, and their rates."""
    headers = [read_header(path) for path in (*map(started_from, runs[1:]), RunFolder(runs[-1]).average)]
    updates = [one.get("averaged_updates", [one["update"]])[-1] for one in headers]
    rates = [Experiment.load(RunFolder(run).experiment).training.learning_rate for run in runs]
    return {
        "first": f"{100 * headers[-1]['mixed']:.0f} %",
        "updates": _listed([f"{one:,}" for one in updates]),
        "rates": _listed([f"{one:g}" for one in rates]),
    }


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def model_fields(folder: Path, recipe: Experiment) -> dict[str, object]:
    """Fields of the model card about the model."""
    header = load_weights(RunFolder(folder).best)[1]
    return {
        **{name: getattr(recipe.model, name) for name in ("encoder_layers", "decoder_layers", "dim", "num_heads")},
        **weight_fields(folder),
        "means": ", ".join(f"{update:,}" for update in header["averaged_updates"]),
        "seed": recipe.seed,
        "batch_tokens": f"{recipe.training.batch_tokens:,}",
    }


if __name__ == "__main__":
    main()
