"""Export the translator that regard is installed with, from a run of `english-french-everyday.yaml`.

    python recipes/ship_english_french.py --data FILE

Averages the weights of the run, exports them in bfloat16 to src/regard_models/english_french, translates the
held-out sentences with what was exported, and writes the scores into the model card there. FILE is the table of pairs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from string import Template

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.bleu import score
from regard.translation.checkpoint import LONGEST_SOURCE, load_state, load_weights
from regard.translation.corpus import ParallelText
from regard.translation.data_split import evaluation_text, split, unseen
from regard.translation.experiment import Experiment
from regard.translation.run_folder import ENGLISH_FRENCH, RunFolder, average, export
from regard.translation.translator import Translator
from regard.utils.atomic_files import atomic_write

CARD = Path(__file__).with_name("english_french.md")
MOST_BYTES = 10_000_000


def main() -> None:
    """Average, export, score, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/english-french-everyday"), help="folder of the run")
    parser.add_argument("--data", type=Path, required=True, help="the table of pairs")
    parser.add_argument("--last", type=int, default=4, help="how many of the last weights are averaged")
    arguments = parser.parse_args()
    run = RunFolder(arguments.run)
    experiment = Experiment.load(run.experiment, [f"data.train.tsv={arguments.data}"])
    trained = training_fields(run, experiment)  # what is of no such run ends here, with the model in place as it was
    average(run.path, last=arguments.last)
    export(run.path, ENGLISH_FRENCH, which="average")
    card = Template(CARD.read_text("utf-8")).substitute(
        trained | weight_fields(ENGLISH_FRENCH) | score_fields(experiment)
    )
    write_card(ENGLISH_FRENCH, card)


def write_card(folder: Path, card: str) -> None:
    """Write a model card into the folder of its model, print both, and refuse a folder that is too large."""
    with atomic_write(folder / "README.md") as partial:
        partial.write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stdout.write(f"{card}\n{folder}: {size / 1e6:.2f} MB\n")
    if size > MOST_BYTES:
        raise CheckpointError(f"the folder has {size:,} bytes; it may have {MOST_BYTES:,}")


def training_fields(run: RunFolder, experiment: Experiment) -> dict[str, object]:
    """Fields of the model card about the model, the data and the training."""
    model, training, data = experiment.model, experiment.training, experiment.data
    if training.start_from is None or data.extra is None or data.split is None:
        raise ConfigurationError(f"{run.path} is no run of recipes/english-french-everyday.yaml")
    text = ParallelText.read(data.train, data.folder)
    parts = split(text, data.split)
    extra = unseen(ParallelText.read(data.extra, data.folder), [parts["validation"], parts["test"]])
    return {
        **{name: getattr(model, name) for name in ("encoder_layers", "decoder_layers", "dim", "num_heads")},
        "pairs": f"{len(text):,}",
        **{name: f"{len(part):,}" for name, part in parts.items()},
        "casual": f"{data.casual_copies:.0%}",
        "extra": len(extra),
        "extra_times": data.extra_times,
        "seed": experiment.seed,
        **progress_fields(RunFolder(training.start_from.parent), "first_"),
        **progress_fields(run, ""),
        "batch_tokens": f"{training.batch_tokens:,}",
        "beam": experiment.search.beam,
    }


def weight_fields(folder: Path) -> dict[str, object]:
    """Fields of the model card about the exported weights."""
    weights, header = load_weights(RunFolder(folder).best)
    return {
        "parameters": f"{sum(tensor.numel() for tensor in {id(one): one for one in weights.values()}.values()):,}",
        "vocabulary": f"{header['source_vocabulary']:,}",
        "longest": header[LONGEST_SOURCE],
        "averaged": len(header["averaged_updates"]),
        "size": f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB with the vocabulary",
    }


def progress_fields(run: RunFolder, prefix: str) -> dict[str, object]:
    """Updates, epochs and minutes of a run, under names with a prefix."""
    made = load_state(run.state)["state_dict"]["_extra_state"]["progress"]
    return {
        f"{prefix}updates": f"{made['position']['update']:,}",
        f"{prefix}epochs": made["position"]["epoch"],
        f"{prefix}minutes": round(made["seconds"] / 60),
    }


def score_fields(experiment: Experiment) -> dict[str, object]:
    """BLEU and chrF of the exported weights on the held-out sentences."""
    text = evaluation_text(experiment.data)
    if text is None:
        raise ConfigurationError(f"{experiment.name} holds nothing out: set data.split.test")
    translations = Translator.load(ENGLISH_FRENCH).translate(text.sources, observe=False)
    scored = score([translation.text for translation in translations], text.targets)
    return {
        "bleu": f"{scored.bleu:.2f}",
        "chrf": f"{scored.chrf:.2f}",
        "bleu_signature": scored.bleu_signature,
        "chrf_signature": scored.chrf_signature,
    }


if __name__ == "__main__":
    main()
