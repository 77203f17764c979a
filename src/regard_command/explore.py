"""`regard explore`: a browser page of the attention of a model."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeAlias

import typer

from regard_command.command_error import CommandError
from regard_command.options import LanguageCodes, Which, languages_of, translator_folder
from regard_command.stdio import arriving_lines, emit, standard_input

if TYPE_CHECKING:
    from collections.abc import Callable

    from regard.explorer import Atlas
    from regard.explorer.collection import Rerun
    from regard.explorer.effect_models import EffectModel
    from regard.explorer.server import LocalServer
    from regard.translation.translator import Translator


MOST_WINDOWS = 64
"""The atlases of all windows are held in memory."""


def explore(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ATLAS | FOLDER | SENTENCE",
            help="File of an atlas, or of several to compare, as of the steps of a training, or their folder; with "
            "--model or --translate a sentence (for --translate without one: the first line of standard input).",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Record this model of transformers, as `save_pretrained` left it, on a sentence or on --text.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What --model reads, in UTF-8; - for standard input.")
    ] = None,
    first: Annotated[
        int | None, typer.Option(metavar="TOKENS", min=1, help="Of the text read so many tokens at the beginning.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Read the text in parts of so many tokens, an atlas for each."),
    ] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Record a translator on a sentence.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=translator_folder,
            help="Which translator: a run of `regard train`, one of transformers, or the name of one that regard comes "
            "with, as english_french_longer, that of `regard translate`. [default: english_french]",
        ),
    ] = None,
    languages: LanguageCodes = None,
    which: Which = "best",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page that works without a server, and end.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The largest page that --html writes, such as 5MB. [default: 32MB]"),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="ATLAS", help="Keep what was recorded as an atlas.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of 127.0.0.1. [default: any that is free]")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="PERMALINK", help='How the page opens: an address of it, or what is behind its "#" there.'
        ),
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            "--allow-embedding",
            metavar="ORIGIN",
            help="Let pages of this origin, such as http://localhost:8000, show the page in a frame, as slides do.",
        ),
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and open no browser.")] = False,
) -> None:
    """Look at attention in a browser: every head of every layer, from the whole map down to a single weight.

    Serves a page on this machine alone until Ctrl-C, and prints its address. What it shows is an atlas that
    regard.explorer.record made, or what a model attends to in a text, or a translator in a sentence.

    With --model and --translate the page lets you edit the text and run the model again, and compare the two; with
    several atlases it leads through them by a slider, and shows what one has more than another.
    """
    given = what or []
    if not (model or translate):
        given = [path for each in given for path in _files(each)]
    _check(given, model, text, translate, checkpoint, html=html, save=save, port=port, no_open=no_open)
    _check_parts(model, first, window, html or save)
    if html is not None and embedding is not None:
        raise CommandError(
            "--allow-embedding is of the server, and a page that --html writes can be shown by any other"
        )
    most = _page_size(budget, html)
    chosen = _ChosenTranslator(checkpoint, which, languages) if translate else None
    if languages is not None and chosen is None:
        raise CommandError("--languages chooses those of a translator, and none was asked for: add --translate")
    if model is not None:
        atlases, rerun, effects = _read_by_model(model, _said(given, text), first, window)
    else:
        atlases, rerun, effects = _atlases(given, chosen)
    shown = next(iter(atlases.values()))
    if save is not None:
        shown.save(save)
        typer.echo(f"{save}: {save.stat().st_size / 1e6:.1f} MB", err=True)
    if html is not None:
        _write(shown, html, state, most)
    else:
        from regard.explorer.server import ExplorerServer

        server = ExplorerServer(atlases, port or 0, state=state, rerun=rerun, effects=effects, embedding=embedding)
        serve(server, no_open)


class _ChosenTranslator(NamedTuple):
    """Which translator is recorded."""

    checkpoint: Path | None
    which: Which
    languages: str | None

    def load(self) -> Translator:
        """Load it."""
        from regard.translation.run_folder import ENGLISH_FRENCH
        from regard.translation.translator import Translator

        return Translator.load(self.checkpoint or ENGLISH_FRENCH, self.which, languages=languages_of(self.languages))


def _said(what: list[str], text: Path | None) -> str:
    """What a model reads: the sentence, a file, or standard input."""
    from regard.explorer.record_text import decoded_text, read_text

    if text is None:
        return decoded_text(what[0].encode(), "the sentence")
    return decoded_text(standard_input().read(), "standard input") if str(text) == "-" else read_text(text)


Looked: TypeAlias = "tuple[dict[str, Atlas], Rerun | None, EffectModel | None]"
"""Atlases by name; of a model the function that records another text, and what measures its heads."""


def _read_by_model(model: Path, said: str, first: int | None, window: int | None) -> Looked:
    """Atlases of what a model reads: one that can be run again, or one for each window of the text."""
    from regard.explorer.record_text import TextReader

    reader = TextReader(model)
    if window is not None:
        parts = reader.windows(said, window)
        if len(parts) > MOST_WINDOWS:
            raise CommandError(
                f"the text has {len(parts):,} windows of {window} tokens, and at most {MOST_WINDOWS} are recorded: "
                "give longer ones, or a shorter text"
            )
        names = (f"{number}. {part[:40]}" for number, part in enumerate(parts, 1))
        return {name: _recorded(reader, part) for name, part in zip(names, parts, strict=True)}, None, None
    said = said if first is None else next(iter(reader.windows(said, first)), said)
    rerun = partial(_recorded, reader)
    return {said: rerun(said)}, rerun, reader.effects


def _recorded(look: Callable[[str], Atlas], text: str) -> Atlas:
    from regard.explorer.recording import with_detected_roles

    return with_detected_roles(look(text))


def _atlases(what: list[str], chosen: _ChosenTranslator | None) -> Looked:
    """The atlases of files, or of what a translator translates."""
    if chosen is None:
        from regard.explorer import Atlas

        return {name: Atlas.open(path) for name, path in _named(what).items()}, None, None
    from regard.explorer.effect_models import TranslatorEffects
    from regard.explorer.record_text import atlas_of_translation

    translator = chosen.load()
    said = what[0] if what else next(iter(next(arriving_lines(standard_input()), [])), "")
    rerun = partial(_recorded, partial(atlas_of_translation, translator))
    return {said: rerun(said)}, rerun, TranslatorEffects.of(translator)


def _files(given: str) -> list[str]:
    """The atlases of a folder, by their names; anything else as it is given."""
    folder = Path(given)
    if not folder.is_dir():
        return [given]
    found = sorted(str(path) for path in folder.glob("*.atlas"))
    if not found:
        raise CommandError(f"the folder {given} has no atlas: the names of their files need to end with .atlas")
    return found


def _named(paths: list[str]) -> dict[str, str]:
    """Files by unique names: those without folder and suffix, where these differ."""
    stems = [Path(path).stem for path in paths]
    return dict(zip(stems if len(set(stems)) == len(stems) else paths, paths, strict=True))


def _write(atlas: Atlas, path: Path, state: str | None, most: int | None) -> None:
    from regard.explorer.static_page import MOST_BYTES, static_page

    page = static_page(atlas, state=state, most=MOST_BYTES if most is None else most)
    page.save(path)
    typer.echo(f"{page.size / 1e6:.1f} MB: {page.contents}", err=True)
    emit([str(path)])


def serve(server: LocalServer, no_open: bool) -> None:
    """Print a server's address, open it in a browser unless `no_open`, and serve until Ctrl-C."""
    from regard.explorer.server import open_browser

    def ready() -> None:
        emit([server.address])
        if not no_open and not open_browser(server.address):
            typer.echo("There is no display or browser here: open the address above in one on this machine.", err=True)
        typer.echo("Ctrl-C ends it.", err=True)

    server.run(ready)


def _check(
    what: list[str],
    model: Path | None,
    text: Path | None,
    translate: bool,
    checkpoint: Path | None,
    *,
    html: Path | None,
    save: Path | None,
    port: int | None,
    no_open: bool,
) -> None:
    """Refuse options that contradict each other."""
    if translate and (model or text):
        raise CommandError("--translate and --model record two different things: leave one of them out")
    if checkpoint is not None and not translate:
        raise CommandError("--checkpoint chooses a translator, and none was asked for: add --translate")
    _check_model(what, model, text)
    if not (translate or model or what):
        raise CommandError(
            'there is nothing to explore: give the file of an atlas, or --model FOLDER "a sentence", or --translate'
        )
    if save is not None and not (translate or model):
        raise CommandError(f"--save keeps what is recorded, and {what[0]} is an atlas already: leave --save out")
    if html is not None and (port is not None or no_open):
        wrong = "--port" if port is not None else "--no-open"
        raise CommandError(f"--html writes a file and serves nothing: leave {wrong} out, or leave --html out")
    _check_several(what, translate, html)
    if not (translate or model):
        _check_sentences(what)
    if html is not None and html in (save, *([] if translate or model else map(Path, what))):
        raise CommandError(f"--html {html} would write the page over the atlas: give it a name of its own")


def _check_model(what: list[str], model: Path | None, text: Path | None) -> None:
    """Refuse a model without a text, a text without a model, and two texts for one model."""
    if model is None and text is not None:
        raise CommandError("--text is there without a model that reads it: add --model FOLDER")
    if model is None:
        return
    if text is None and not what:
        raise CommandError(
            "--model is there without a text: give a sentence in quotes, or add --text FILE, or --text - for "
            "standard input"
        )
    if text is not None and what:
        raise CommandError(f"--model reads one text, and there are {what[0][:40]!r} and --text: leave one out")
    if len(what) > 1:
        raise CommandError(f"--model takes one sentence, and there are {len(what)}: put it into quotes")


SIZE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) ?(kB|MB|GB)", re.ASCII | re.IGNORECASE)
UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9}


def _page_size(budget: str | None, html: Path | None) -> int | None:
    """The bytes of `--budget`; None without it."""
    if budget is None:
        return None
    if html is None:
        raise CommandError("--budget is the size of the page that --html writes: add --html FILE, or leave it out")
    told = SIZE.fullmatch(budget)
    if told is None:
        raise CommandError(f"--budget is {budget!r}; it needs a number with kB, MB or GB, such as 5MB")
    return int(float(told[1]) * UNITS[told[2].lower()])


def _check_parts(model: Path | None, first: int | None, window: int | None, file: Path | None) -> None:
    """Refuse --first and --window where there is no text to cut, and several atlases for one file."""
    for name, given in (("--first", first), ("--window", window)):
        if given is not None and model is None:
            raise CommandError(f"{name} cuts the text that a model reads, and there is none: add --model FOLDER")
    if first is not None and window is not None:
        raise CommandError("--first reads one part of the text and --window all: leave one of them out")
    if window is not None and file is not None:
        raise CommandError(
            f"--window makes an atlas of each part, and {file} has room for one: take --first, or leave --html and "
            "--save out"
        )


def _check_sentences(what: list[str]) -> None:
    """Refuse a sentence in place of an atlas: it has spaces, and is no file."""
    for given in what:
        if " " in given and not Path(given).exists():
            raise CommandError(
                f"there is no atlas {given!r}; to look at the translation of a sentence, add --translate, and at "
                "what a model of your own attends to in it, --model FOLDER"
            )


def _check_several(what: list[str], translate: bool, html: Path | None) -> None:
    """Refuse more sentences or atlases than can be shown."""
    if translate and len(what) > 1:
        raise CommandError(f"--translate takes one sentence, and there are {len(what)}: put it into quotes")
    twice = next((path for path in what if what.count(path) > 1), None)
    if twice is not None:
        raise CommandError(f"the atlas {twice} is there more than once: leave it out but once")
    if html is not None and len(what) > 1:
        raise CommandError(f"--html writes a page of one atlas, and there are {len(what)}: write one at a time")
