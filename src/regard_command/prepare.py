"""`regard prepare`: cleans, varies, joins and mixes parallel texts into one to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard_command.options import Overrides
from regard_command.stdio import emit
from regard_command.train import default_folder


def prepare(
    preparation: Annotated[
        Path, typer.Argument(metavar="PREPARATION.yaml", show_default=False, help="The YAML file of the preparation.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="FOLDER", help="Where the text goes. [default: data/NAME]")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Prepare parallel text for training.

    Reads the texts that the YAML file names, holds out what is validated and tested on, leaves out pairs that are too
    long, of very different lengths, or there twice, adds copies with other names, numbers, case and marks and joined
    pairs, and puts placeholders for what a translation copies: numbers, addresses, quoted words and rare names.

    The folder gets train.tsv.gz, validation.tsv.gz, test.tsv.gz, placeholders.json and preparation.yaml. Prints the
    folder; standard error tells how many pairs each step left. The keys are in docs/yaml-preparation.md.
    """
    from regard.translation.preparation import Preparation, PreparedText

    settings = Preparation.load(preparation, overrides or ())
    folder = folder or default_folder(settings.name, "data")
    text = PreparedText.of(settings)
    text.write(folder)
    settings.save(folder / "preparation.yaml")
    held_out = {"to validate on": len(text.validation), "to test on": len(text.test)}
    for step, count in (text.counts | held_out).items():
        typer.echo(f"{count:>10,} pairs {step}", err=True)
    emit([str(folder)])
