"""Export the two Korean-English translators that `regard steps` comes with, from runs of their recipes.

    python recipes/ship_korean_english.py --data FILE

Exports runs/tatoeba-korean-english-luong and -bahdanau in bfloat16 to src/regard_models/korean_english, translates
the held-out sentences with what was exported, and writes the scores into the card there. FILE is the table of pairs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from string import Template

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.bleu import Scores, score
from regard.translation.checkpoint import load_state, load_weights
from regard.translation.corpus import ParallelText
from regard.translation.data_split import evaluation_text, split, unseen
from regard.translation.experiment import Experiment
from regard.translation.run_folder import KOREAN_ENGLISH, RunFolder, export
from regard.translation.translator import Translator
from regard.utils.atomic_files import atomic_write

CARD = Path(__file__).with_name("korean_english.md")
MOST_BYTES = 6_000_000


def main() -> None:
    """Export both runs, score them, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the two runs")
    parser.add_argument("--data", type=Path, required=True, help="the table of pairs")
    arguments = parser.parse_args()
    rows, fields = [], {}
    for folder in KOREAN_ENGLISH.values():
        run = RunFolder(arguments.runs / f"tatoeba-korean-english-{folder.name}")
        experiment = Experiment.load(run.experiment, [f"data.train.tsv={arguments.data}"])
        export(run.path, folder)
        scored = held_out_score(folder, experiment)
        rows.append(row(folder, run, scored))
        fields = {"bleu_signature": scored.bleu_signature, "chrf_signature": scored.chrf_signature}
        fields |= data_fields(folder, experiment)
    parent = next(iter(KOREAN_ENGLISH.values())).parent
    size = sum(path.stat().st_size for folder in KOREAN_ENGLISH.values() for path in folder.iterdir())
    if size > MOST_BYTES:
        raise CheckpointError(f"the models have {size:,} bytes; they may have {MOST_BYTES:,}")
    card = Template(CARD.read_text("utf-8")).substitute(fields, rows="\n".join(rows), size=f"{size / 1e6:.1f} MB")
    with atomic_write(parent / "README.md") as partial:
        partial.write_text(card, encoding="utf-8")
    sys.stdout.write(card)


def held_out_score(folder: Path, experiment: Experiment) -> Scores:
    """The score of exported weights on the held-out sentences."""
    text = evaluation_text(experiment.data)
    if text is None:
        raise ConfigurationError(f"{experiment.name} holds nothing out: set data.split.test")
    translations = Translator.load(folder).translate(text.sources, observe=False)
    return score([translation.text for translation in translations], text.targets)


def row(folder: Path, run: RunFolder, scored: Scores) -> str:
    """The row of the card's table for one model."""
    weights, _ = load_weights(RunFolder(folder).best)
    made = load_state(run.state)["state_dict"]["_extra_state"]["progress"]
    cells = [
        f"`{folder.name}`",
        f"{sum(tensor.numel() for tensor in weights.values()):,}",
        f"{made['position']['update']:,}",
        str(round(made["seconds"] / 60)),
        f"{scored.bleu:.2f}",
        f"{scored.chrf:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def data_fields(folder: Path, experiment: Experiment) -> dict[str, object]:
    """Fields of the card about the model and the data, which both runs share."""
    data, model = experiment.data, experiment.model
    if data.extra is None or data.split is None:
        raise ConfigurationError(f"{experiment.name} is no run of recipes/tatoeba-korean-english-{folder.name}.yaml")
    text = ParallelText.read(data.train, data.folder)
    parts = split(text, data.split)
    extra = unseen(ParallelText.read(data.extra, data.folder), [parts["validation"], parts["test"]])
    source, target = RunFolder(folder).vocabularies()
    return {
        **{name: getattr(model, name) for name in ("embedding_dim", "hidden_dim")},
        **{name: f"{len(part):,}" for name, part in parts.items()},
        "pairs": f"{len(text):,}",
        "casual": f"{data.casual_copies:.0%}",
        "extra": len(extra),
        "extra_times": data.extra_times,
        "source_size": f"{len(source):,}",
        "target_size": f"{len(target):,}",
        "seed": experiment.seed,
        "beam": experiment.search.beam,
    }


if __name__ == "__main__":
    main()
