"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Checkpoint = Annotated[
    Path,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        show_default=False,
        help="Folder of a training run, as `regard train` made it.",
    ),
]
Which = Annotated[
    Literal["best", "last", "average"],
    typer.Option(
        "--which", help="The weights that validated best, those of the last save, or those that `regard average` made."
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1, mps.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sentences that are computed together.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Another value for one key of the experiment; may be repeated."),
]
Layer = Annotated[
    int | None,
    typer.Option(
        "--layer", min=0, help="Whose attention, of a model with several layers, from 0. [default: their mean]"
    ),
]
Head = Annotated[int | None, typer.Option("--head", min=0, help="The same of heads.")]
