"""`regard demo`: everything at once, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where pictures and models go.")] = Path(
        "demo"
    ),
) -> None:
    """Translate, train, compare and draw.

    Translates everyday sentences with the model that regard comes with, then trains translators of dates, which it
    makes, with every score, prints how good and how fast they are, and draws where they look.
    """
    from regard.translation.demo import run

    run(folder)
