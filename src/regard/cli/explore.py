"""`regard explore`: a browser page of the attention of a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from regard.cli.options import LanguageCodes, Which, languages_of
from regard.cli.stdio import arriving_lines, emit, standard_input
from regard.errors import AtlasError, ConfigurationError

if TYPE_CHECKING:
    from regard.explorer import Atlas
    from regard.explorer.collection import Rerun
    from regard.explorer.effect_models import EffectModel
    from regard.explorer.server import LocalServer
    from regard.translation.translator import Translator


def explore(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ATLAS | SENTENCE",
            help="File of an atlas, or of several to compare, as of the steps of a training; with --translate a "
            "sentence, and without one the first line of standard input.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Record this model of transformers, as `save_pretrained` left it, on --text."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="What --model reads, in UTF-8.")] = None,
    translate: Annotated[bool, typer.Option("--translate", help="Record a translator on a sentence.")] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Which translator: a run of `regard train`, or one of transformers. [default: English to French, as "
            "installed]",
        ),
    ] = None,
    languages: LanguageCodes = None,
    which: Which = "best",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page that works without a server, and end.")
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
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and open no browser.")] = False,
) -> None:
    """Look at attention in a browser: every head of every layer, from the whole map down to a single weight.

    Serves a page on this machine alone until Ctrl-C, and prints its address. What it shows is an atlas that
    regard.explorer.record made, or what a model attends to in a text, or a translator in a sentence.

    With --model and --translate the page lets you edit the text and run the model again, and compare the two; with
    several atlases it leads through them by a slider, and shows what one has more than another.
    """
    given = what or []
    _check(given, model, text, translate, checkpoint, html=html, save=save, port=port, no_open=no_open)
    chosen = _ChosenTranslator(checkpoint, which, languages) if translate else None
    if languages is not None and chosen is None:
        raise ConfigurationError("--languages chooses those of a translator, and none was asked for: add --translate")
    atlases, rerun, effects = _atlases(given, model, text, chosen)
    first = next(iter(atlases.values()))
    if save is not None:
        first.save(save)
        typer.echo(f"{save}: {save.stat().st_size / 1e6:.1f} MB", err=True)
    if html is not None:
        _write(first, html, state)
    else:
        from regard.explorer.server import ExplorerServer

        serve(ExplorerServer(atlases, port or 0, state=state, rerun=rerun, effects=effects), no_open)


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


def _atlases(
    what: list[str], model: Path | None, text: Path | None, chosen: _ChosenTranslator | None
) -> tuple[dict[str, Atlas], Rerun | None, EffectModel | None]:
    """The atlases by name, for a model the function that records another text, and what measures its heads."""
    if chosen is not None:
        from regard.explorer.effect_models import TranslatorEffects
        from regard.explorer.record_text import atlas_of_translation

        translator = chosen.load()
        look, effects = partial(atlas_of_translation, translator), TranslatorEffects.of(translator)
        said = what[0] if what else next(iter(next(arriving_lines(standard_input()), [])), "")
    elif model is not None and text is not None:
        from regard.explorer.record_text import TextReader, read_text

        said, look = read_text(text), TextReader(model)
        effects = look.effects
    else:
        from regard.explorer import Atlas

        return {name: Atlas.open(path) for name, path in _named(what).items()}, None, None
    from regard.explorer.recording import with_detected_roles

    def rerun(text: str) -> Atlas:
        return with_detected_roles(look(text))

    return {said: rerun(said)}, rerun, effects


def _named(paths: list[str]) -> dict[str, str]:
    """Files by unique names: those without folder and suffix, where these differ."""
    stems = [Path(path).stem for path in paths]
    return dict(zip(stems if len(set(stems)) == len(stems) else paths, paths, strict=True))


def _write(atlas: Atlas, path: Path, state: str | None) -> None:
    from regard.explorer.static_page import static_page

    page = static_page(atlas, state=state)
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
        raise ConfigurationError("--translate and --model record two different things: leave one of them out")
    if checkpoint is not None and not translate:
        raise ConfigurationError("--checkpoint chooses a translator, and none was asked for: add --translate")
    if (model is None) != (text is None):
        has, needs = ("--model", "--text FILE") if text is None else ("--text", "--model FOLDER")
        raise ConfigurationError(f"{has} is there without the other: a model needs a text to read; add {needs}")
    if model is not None and what:
        raise ConfigurationError(f"there are both an atlas, {what[0]}, and --model: leave one of them out")
    if not (translate or model or what):
        raise AtlasError(
            "there is nothing to explore: give the file of an atlas, or --model FOLDER --text FILE, or --translate"
        )
    if save is not None and not (translate or model):
        raise ConfigurationError(f"--save keeps what is recorded, and {what[0]} is an atlas already: leave --save out")
    if html is not None and (port is not None or no_open):
        wrong = "--port" if port is not None else "--no-open"
        raise ConfigurationError(f"--html writes a file and serves nothing: leave {wrong} out, or leave --html out")
    _check_several(what, translate, html)
    if not (translate or model):
        _check_sentences(what)
    if html is not None and html in (save, *([] if translate else map(Path, what))):
        raise ConfigurationError(f"--html {html} would write the page over the atlas: give it a name of its own")


def _check_sentences(what: list[str]) -> None:
    """Refuse a sentence in place of an atlas: it has spaces, and is no file."""
    for given in what:
        if " " in given and not Path(given).exists():
            raise ConfigurationError(
                f"there is no atlas {given!r}; to look at the translation of a sentence, add --translate, and at "
                "what a model of your own attends to in it, --model FOLDER --text FILE"
            )


def _check_several(what: list[str], translate: bool, html: Path | None) -> None:
    """Refuse more sentences or atlases than can be shown."""
    if translate and len(what) > 1:
        raise ConfigurationError(f"--translate takes one sentence, and there are {len(what)}: put it into quotes")
    twice = next((path for path in what if what.count(path) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"the atlas {twice} is there more than once: leave it out but once")
    if html is not None and len(what) > 1:
        raise ConfigurationError(f"--html writes a page of one atlas, and there are {len(what)}: write one at a time")
