"""Options that several commands share, and the page that `--html` writes."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from regard_command.command_error import CommandError

if TYPE_CHECKING:
    from regard.explorer.static_page import StaticPage


def translator_folder(name: str) -> Path:
    """The folder of a translator, which may be named: the library, which knows the names, is asked for no folder."""
    if os.path.isdir(name):
        return Path(name)
    from regard.translation import run_folder

    return run_folder.translator_folder(name)


Checkpoint = Annotated[
    Path,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        parser=translator_folder,
        show_default=False,
        help="Folder of a training run, as `regard train` made it, or of a translator of transformers, or the name of "
        "one that regard comes with: english_french, english_french_longer, korean_english/luong, "
        "korean_english/bahdanau.",
    ),
]
LanguageCodes = Annotated[
    str | None,
    typer.Option(
        "--languages",
        metavar="SOURCE:TARGET",
        help="Of a translator of many languages, by its own codes, as eng_Latn:fra_Latn, or :fr for the target alone. "
        "[default: those of its folder]",
    ),
]
Which = Annotated[
    Literal["best", "last", "average"],
    typer.Option(
        "--which", help="The weights that validated best, those of the last save, or those that `regard average` made."
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1, mps.")]
BatchSize = Annotated[
    int | None,
    typer.Option(
        "--batch-size",
        min=1,
        help="Sentences that are computed together. [default: 64, or where they are short as many as have 2,048 tokens "
        "and 640 hypotheses]",
    ),
]
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
PageFile = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write one page, with the code beside each finding, that works without a server."
    ),
]
Head = Annotated[int | None, typer.Option("--head", min=0, help="The same of heads.")]


def languages_of(text: str | None) -> tuple[str | None, str | None]:
    """The codes of `--languages`, source and target; None of one that is not named.

    Raises:
        CommandError: it is not SOURCE:TARGET.

    >>> languages_of("eng_Latn:fra_Latn"), languages_of(":fr"), languages_of(None)
    (('eng_Latn', 'fra_Latn'), (None, 'fr'), (None, None))
    """
    if text is None:
        return None, None
    source, colon, target = text.partition(":")
    if not colon or not (source or target):
        raise CommandError(
            f"--languages {text!r} needs a colon between source and target, as eng_Latn:fra_Latn, or :fr"
        )
    return source or None, target or None


def check_own_folder(folder: Path, written: str) -> None:
    """Refuse to write into the folder of a translator that regard comes with.

    Raises:
        CommandError: it is one.
    """
    from regard.translation.run_folder import INSTALLED

    for name, installed in INSTALLED.items():
        if folder == installed:
            raise CommandError(
                f"{name} comes with regard, and {written} would go into its folder: copy it first, with regard export "
                f"--checkpoint {name} --to FOLDER"
            )


def check_page_file(page: Path, read: Collection[Path] = ()) -> None:
    """Refuse a file for a page before the work for it is done: one that is read, or that cannot be written.

    Raises:
        CommandError: the file is one of `read`, Python source, a folder, or in no folder.
    """
    if page.suffix in (".py", ".pyi") or page.resolve() in {path.resolve() for path in read}:
        raise CommandError(f"--html {page} would write the page over source code: give it a name of its own")
    if os.path.isdir(page):  # False where Path.is_dir raises, as for a name that is too long
        raise CommandError(f"--html {page} is a folder: name a file in it, such as {page / 'report.html'}")
    if not os.path.isdir(page.parent):
        raise CommandError(f"--html {page}: the folder {page.parent} does not exist; make it first")


def save_page(page: StaticPage, path: Path) -> None:
    """Write a page, replaced atomically, and report its size on standard error.

    Raises:
        CheckpointError: it cannot be written.
    """
    page.save(path)
    typer.echo(f"page of {page.size / 1e6:.1f} MB: {path}", err=True)
