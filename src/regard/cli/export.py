"""`regard export`: a run without its training state, in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli.options import Checkpoint, Which
from regard.cli.stdio import emit


def export(
    checkpoint: Checkpoint,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", show_default=False, help="Where it goes.")],
    which: Which = "best",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="What the weights are rounded to.")
    ] = "bfloat16",
) -> None:
    """Write what translating needs of a run into a folder of its own.

    The folder has the experiment, the vocabularies and one set of weights, and the other commands take it as
    --checkpoint. Prints its path.
    """
    from regard.translation.export_run import export as run

    folder = run(checkpoint, to, which=which, dtype=dtype)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    typer.echo(f"{size / 1e6:.1f} MB", err=True)
    emit([str(folder)])
