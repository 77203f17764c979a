"""`regard average`: the mean of several weights of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.options import Checkpoint
from regard.cli.stdio import emit


def average(
    checkpoint: Checkpoint,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Average the last N. [default: all]")] = None,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", help="Average the N that validated best.")] = None,
) -> None:
    """Average weights that a run has saved.

    A run keeps the weights of its stops with --set training.keep_last=N or --set training.keep_best=N. The average goes
    into the run folder, where the other commands find it with --which average. Prints its path.
    """
    from regard.translation.averaging import average as run
    from regard.translation.checkpoint import read_header

    path = run(checkpoint, last=last, best=best)
    updates = read_header(path)["averaged_updates"]
    typer.echo(f"the mean of {len(updates):,} weights, after updates {', '.join(map(str, updates))}", err=True)
    emit([str(path)])
