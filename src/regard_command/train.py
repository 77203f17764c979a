"""`regard train`: train the experiment of a YAML file into a run folder."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.options import Overrides
from regard_command.stdio import emit

if TYPE_CHECKING:
    from regard.language.language_experiment import LanguageExperiment
    from regard.translation.experiment import Experiment


def train(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.yaml", show_default=False, help="The YAML file of the experiment.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="FOLDER", help="Where the run is kept. [default: runs/NAME]")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a translator or a language model, or resume a training.

    Prints the settings in effect, whether it begins or resumes, its progress, and at the end the folder, which the
    other commands take as --checkpoint. The progress is a bar in a terminal; elsewhere a line at each validation and
    every half minute.

    The keys of the YAML file are in docs/yaml.md, which `python -m regard.translation.experiment` prints; those of
    a language model, `task: language-model`, in docs/yaml-language-model.md. With its key `training.ring`,
    `torchrun --nproc-per-node 2 --no-python regard train EXPERIMENT.yaml` shards each sequence over processes.

    Ctrl-C, and the SIGTERM of a cluster, end it after the current update with its state saved.
    """
    from lightning.pytorch.utilities import rank_zero_only

    from regard.language.language_experiment import LanguageExperiment, load_experiment
    from regard.translation.run_folder import RunFolder

    settings = load_experiment(experiment, overrides or ())
    folder = folder or default_folder(settings.name, "runs")
    speaks = rank_zero_only.rank == 0  # one for all the processes of a run, each of which runs this command
    if speaks:
        typer.echo(settings.dump(), err=True)
    try:
        with redirect_stdout(sys.stderr):  # progress bars are for the person, not for the pipe
            if isinstance(settings, LanguageExperiment):
                summary = _train_language_model(settings, folder)
            else:
                summary = _train_translator(settings, folder)
    except (KeyboardInterrupt, SystemExit):
        if speaks and RunFolder(folder).state.exists():
            typer.echo(f"interrupted; {folder} has the state, and the same command goes on from there", err=True)
        raise
    if not speaks:
        return
    typer.echo(summary, err=True)
    emit([str(folder)])


def _train_translator(settings: Experiment, folder: Path) -> str:
    from regard.translation.training import train as run

    result = run(settings, folder, verbose=True)
    return (
        f"{result.epochs:,} epochs, {result.updates:,} updates in {result.seconds:,.0f} s, "
        f"{result.target_tokens_per_second:,.0f} target tokens a second"
    )


def _train_language_model(settings: LanguageExperiment, folder: Path) -> str:
    from regard.language.train_language_model import train_language_model

    result = train_language_model(settings, folder)
    held_out = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.3f} bits a byte of the held-out text"
    return (
        f"{result.updates:,} updates in {result.seconds:,.0f} s, {result.tokens_per_second:,.0f} tokens a second"
        f"{held_out}"
    )


def default_folder(name: str, parent: str) -> Path:
    """PARENT/NAME, for a name that stays within the parent.

    Raises:
        CommandError: the name leads elsewhere.
    """
    if not name.isprintable() or name in (".", "..") or any(sign in name for sign in "/\\"):
        raise CommandError(
            f"name: has {name!r}, which cannot be the name of a folder in {parent}; write a name without slashes and "
            "control characters, or choose the folder of the run with --folder"
        )
    return Path(parent) / name
