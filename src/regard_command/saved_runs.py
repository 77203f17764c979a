"""`regard average` and `regard export`: the mean of a run's weights, and a run without its training state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard_command.options import Checkpoint, Which
from regard_command.stdio import emit


def average(
    checkpoint: Checkpoint,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Average the last N. [default: all]")] = None,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", help="Average the N that validated best.")] = None,
) -> None:
    """Average weights that a run has saved.

    A run keeps the weights of its stops with --set training.keep_last=N or --set training.keep_best=N. The average goes
    into the run folder, where the other commands find it with --which average. Prints its path.
    """
    from regard.translation.checkpoint import read_header
    from regard.translation.run_folder import average as run

    path = run(checkpoint, last=last, best=best)
    updates = read_header(path)["averaged_updates"]
    typer.echo(f"the mean of {len(updates):,} weights, after updates {', '.join(map(str, updates))}", err=True)
    emit([str(path)])


def export(
    checkpoint: Checkpoint,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", show_default=False, help="Where it goes.")],
    which: Which = "best",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="What the weights are rounded to.")
    ] = "bfloat16",
    layout: Annotated[
        Literal["regard", "marian", "ctranslate2"],
        typer.Option(
            "--layout",
            help="Of the folder: that of a run, of a MarianMTModel of transformers, or of a model of CTranslate2, both "
            "in float32.",
        ),
    ] = "regard",
) -> None:
    """Write what translating needs of a run into a folder of its own.

    The folder has the experiment, the vocabularies and one set of weights, and the other commands take it as
    --checkpoint. With --layout marian it is one that transformers loads as a MarianMTModel, with ctranslate2 one that
    ctranslate2.Translator loads. Prints its path.
    """
    from regard.translation.run_folder import export as run
    from regard.translation.translator import Translator

    if layout != "regard":
        translator, folder = Translator.load(checkpoint, which), to
        if layout == "marian":
            translator.to_huggingface(folder)
        else:
            translator.to_ctranslate2(folder)
    else:
        folder = run(checkpoint, to, which=which, dtype=dtype)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    typer.echo(f"{size / 1e6:.1f} MB", err=True)
    emit([str(folder)])
