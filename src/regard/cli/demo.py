"""`regard demo`: everything at once, on made data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where pictures and models go.")] = Path(
        "demo"
    ),
) -> None:
    """Train, compare and draw, on made data.

    Trains translators of dates with every score, prints how good and how fast they are, and draws where they look.
    """
    from regard.translation.demo import run

    run(folder)
