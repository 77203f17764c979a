"""`regard demo`: translating, training and drawing, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from regard.translation.translator import Translator


def demo(
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where pictures and models go.")] = Path(
        "demo"
    ),
) -> None:
    """Translate, train, compare and draw.

    Translates everyday sentences with the model that regard comes with, then trains translators of dates, which it
    generates, with every score, prints their quality and speed, and draws their attention. Last it writes two pages for
    a browser: all attention of a translator of dates, and of the one that regard comes with.
    """
    from regard.translation.date_demo import SENTENCES, SHOWN, examples, run
    from regard.translation.run_folder import ENGLISH_FRENCH
    from regard.translation.translator import Translator

    run(folder)
    typer.echo("\nWhat they attend to, to look into with a browser; no server is needed:")
    in_latin_letters = examples().sources[1]  # which every browser has a font for
    _write(Translator.load(folder / SHOWN, which="last"), in_latin_letters, folder / SHOWN / "attention.html")
    _write(Translator.load(ENGLISH_FRENCH), SENTENCES[2], folder / "english-french.html")
    typer.echo('Yours: regard explore --translate "Where is the station?"')


def _write(translator: Translator, sentence: str, path: Path) -> None:
    """Write an explorer page of a translation, and print its size."""
    from regard.explorer import static_page, with_detected_roles
    from regard.explorer.record_translation import atlas_of_translation

    page = static_page(with_detected_roles(atlas_of_translation(translator, sentence, n_best=1)))
    page.save(path)
    typer.echo(f"  {path}  {page.size / 1e6:.1f} MB: {sentence}")
