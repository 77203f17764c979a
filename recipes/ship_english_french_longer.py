"""Export the translator of a run of `english-french-longer.yaml`, with its model card.

    python recipes/ship_english_french_longer.py --run runs/english-french-longer --data DIR --to FOLDER

Averages the last weights of the run, exports them in bfloat16 to FOLDER, and writes the scores of
`recipes/english_french_floors.py` into the model card there; DIR is that of these. What it learned from is for
non-commercial research: FOLDER must not become a part of a package without that condition.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from string import Template

import english_french_floors

from regard.errors import CheckpointError
from regard.translation.checkpoint import load_state, load_weights
from regard.translation.experiment import Experiment
from regard.translation.run_folder import RunFolder, average, export
from regard.translation.translator import Translator
from regard.utils.atomic_files import atomic_write

CARD = Path(__file__).with_name("english_french_longer.md")
MOST_BYTES = 10_000_000


def main() -> None:
    """Average, export, score, and write the card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/english-french-longer"), help="folder of the run")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--to", type=Path, required=True, help="folder of the exported translator")
    parser.add_argument("--last", type=int, default=3, help="how many of the last weights are averaged")
    arguments = parser.parse_args()
    run = RunFolder(arguments.run)
    average(run.path, last=arguments.last)
    folder = export(run.path, arguments.to, which="average")
    table = "\n".join(english_french_floors.report(Translator.load(folder), arguments.data))
    card = Template(CARD.read_text("utf-8")).substitute(fields(run, folder), table=table)
    with atomic_write(folder / "README.md") as partial:
        partial.write_text(card, encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    sys.stdout.write(f"{card}\n{folder}: {size / 1e6:.2f} MB\n")
    if size > MOST_BYTES:
        raise CheckpointError(f"the folder has {size:,} bytes; it may have {MOST_BYTES:,}")


def fields(run: RunFolder, folder: Path) -> dict[str, object]:
    """Fields of the model card about the model and its training."""
    experiment = Experiment.load(run.experiment)
    weights, header = load_weights(RunFolder(folder).best)
    made = load_state(run.state)["state_dict"]["_extra_state"]["progress"]
    model, training = experiment.model, experiment.training
    return {
        **{name: getattr(model, name) for name in ("encoder_layers", "decoder_layers", "dim", "num_heads")},
        "parameters": f"{sum(tensor.numel() for tensor in {id(one): one for one in weights.values()}.values()):,}",
        "vocabulary": f"{header['source_vocabulary']:,}",
        "averaged": ", ".join(f"{update:,}" for update in header["averaged_updates"]),
        "size": f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB with the vocabulary",
        "seed": experiment.seed,
        "updates": f"{made['position']['update']:,}",
        "minutes": round(made["seconds"] / 60),
        "batch_tokens": f"{training.batch_tokens:,}",
    }


if __name__ == "__main__":
    main()
