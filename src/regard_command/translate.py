"""`regard translate`: translates its arguments, or standard input line by line, and saves the attention weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard_command.command_error import CommandError
from regard_command.options import BatchSize, Device, Head, LanguageCodes, Layer, Which, languages_of, translator_folder
from regard_command.stdio import arriving_lines, emit, standard_input

if TYPE_CHECKING:
    from regard.translation.settings import SearchSettings
    from regard.translation.translated_line import Translation
    from regard.translation.translator import Translator


def translate(
    sentences: Annotated[
        list[str] | None, typer.Argument(metavar="SENTENCE", help="To translate; without any, standard input is.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            parser=translator_folder,
            help="Folder of a training run, as `regard train` made it, or of a translator of transformers, or the name "
            "of one that regard comes with: english_french, english_french_longer, korean_english/luong, "
            "korean_english/bahdanau. [default: english_french_longer]",
        ),
    ] = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, help="Print so many translations of a line, as LINE ||| TEXT ||| SCORE.")
    ] = None,
    beam: Annotated[
        int | None, typer.Option(min=1, help="Beams; 1 is greedy search. [default: the experiment's]")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="α of log P / L^α, where L is the length, or (5 + length) / 6, by the experiment's "
            "search.penalty_form: a greater one favours longer translations. [default: the experiment's]",
        ),
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save the attention weights of the best translations: heat maps (.png) or arrays (.npz).",
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Print how far each line can be trusted, 0 to 1, as TRUST ||| TEXT."),
    ] = False,
    terms: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A terminology: in each line a phrase of the source, a tab, and what the translation says for it.",
        ),
    ] = None,
    force: Annotated[
        list[str] | None,
        typer.Option("--force", metavar="WORDS", help="What every translation has to hold; may be repeated."),
    ] = None,
    split_above: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Translate a line of more tokens in parts, sentence by sentence; 0 translates every line whole. "
            "[default: the longest sentence of the training]",
        ),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="Round the weights of a Transformer's decoder to int8: faster on a CPU, nearly as accurate."
        ),
    ] = False,
    errors: Annotated[
        Literal["strict", "replace", "skip"],
        typer.Option(
            help="What becomes of a line that is not UTF-8: it ends the command, its bad bytes become the replacement "
            "character, or its translation is left empty."
        ),
    ] = "strict",
    languages: LanguageCodes = None,
    which: Which = "best",
    device: Device = "cpu",
    batch_size: BatchSize = None,
    layer: Layer = None,
    head: Head = None,
) -> None:
    """Translate sentences, or standard input line by line.

    Lines are translated as they arrive: one that is typed is answered at once. An empty line gives an empty line.
    Without --checkpoint it is a small model that regard comes with, English to French, for everyday sentences and
    captions. It is for non-commercial use, as some of the text that it learned from.

    Tags, as <b>, placeholders, as {name} and %s, signs that the model has never seen, such as emoji, and words of more
    than 200 characters are kept as they are; the attention puts tags around the words that theirs became. Standard
    error says so, by the number of the line, and also which letters it does not know, and which lines are
    longer than any that it was trained on: these are translated sentence by sentence, and sentences of more than twice
    as many tokens in pieces.

    Where the model was calibrated (`regard test --calibrate`), a warning says which translations are likely to be poor,
    and --trust prints the quality that is expected of each: chrF / 100.

    What --terms and --force name stands in the translation as it is written there, as whole words. A phrase of the
    source is found whatever its case; the attention says where its translation goes.

    LINE of --n-best counts from 0. Of several lines, --attention FILE.png draws the first to FILE.png and the others to
    FILE-2.png, FILE-3.png and so on; FILE.npz has all, as 1.weights, 1.source, 1.target, 2.weights and so on.

    --int8 is for Transformers on a CPU: a few translations change. It is faster on x86 processors with AVX2 and no
    AVX-512, or with AVX-512 VNNI.

    Of a Transformer the pictures are of --layer and --head, or of the mean over all; the arrays have all of them,
    1.weights as [target, layer, head, source], and 1.self_weights for the attention to its own words.
    """
    from regard.translation.run_folder import ENGLISH_FRENCH_LONGER
    from regard.translation.terminology import Terminology
    from regard.translation.translator import Translator
    from regard_command.attention_file import attention_file

    _check(sentences, attention, layer=layer, head=head)
    forced = Terminology.read(terms, always=force or []) if terms else Terminology(always=force or [])
    if trust and n_best is not None:
        raise CommandError("--trust is of the best translation, and --n-best prints others too: leave one of them out")
    kept = attention_file(attention, layer, head)
    folder = checkpoint or ENGLISH_FRENCH_LONGER
    translator = Translator.load(folder, which, device, languages_of(languages))
    forced.check(translator.target_vocabulary)
    if trust and translator.trust is None:
        raise CommandError(
            f"{folder} was not calibrated, so nothing is known of how far it can be trusted: regard test --checkpoint "
            f"{folder} --calibrate, with text that it was not trained on"
        )
    if int8:
        translator.quantize()
    told = {"n_best": n_best or 1, "beam": beam, "length_penalty": length_penalty}
    search = _search(folder, translator, {key: value for key, value in told.items() if value is not None})
    if checkpoint is None:
        what = "English to French, by the model that regard comes with, for non-commercial use"
        typer.echo(f"{what}; --checkpoint names another", err=True)
    number = 1
    arriving = arriving_lines(standard_input(), errors, lambda warning: typer.echo(warning, err=True))
    for lines in [sentences] if sentences else arriving:
        translations = translator.translate(
            lines,
            search=search,
            batch_size=batch_size,
            first_line=number,
            observe=attention is not None,
            split_above=translator.longest_trained if split_above is None else split_above or None,
            terms=forced,
        )
        for warning in (warning for translation in translations for warning in translation.warnings):
            typer.echo(warning, err=True)
        if trust:
            emit(_trusted(translations))
        else:
            emit(_plain(translations) if n_best is None else _ranked(translations, number - 1))
        for line, translation in enumerate(translations, start=number):
            kept.add(line, translation)
        number += len(lines)
    kept.close()


def _search(folder: Path, translator: Translator, told: dict[str, Any]) -> SearchSettings:
    """The settings of the folder's search, but for those that were told."""
    from regard.translation.experiment import Experiment
    from regard.translation.pretrained_search import with_choices
    from regard.translation.run_folder import RunFolder

    run = RunFolder(folder)
    if not run.experiment.exists():  # a model of transformers, or of Marian
        return with_choices(translator.search, told)
    return Experiment.load(run.experiment, [f"search.{key}={told[key]}" for key in told]).search


def _check(sentences: list[str] | None, attention: Path | None, **chosen: int | None) -> None:
    """Refuse empty sentences and options without effect before any model is loaded."""
    for number, sentence in enumerate(sentences or [], start=1):
        if not sentence.strip():
            raise CommandError(
                f"sentence {number} of {len(sentences or [])} is empty; give text to translate, or give no sentence "
                "and let standard input have the lines"
            )
    for name, value in chosen.items():
        if value is not None and (attention is None or attention.suffix == ".npz"):
            raise CommandError(
                f"--{name} chooses what is drawn, and no picture was asked for: add --attention FILE.png, or leave it "
                "out; FILE.npz has all layers and heads"
            )


def _plain(translations: Iterable[Translation]) -> Iterator[str]:
    return (translation.text for translation in translations)


def _trusted(translations: Iterable[Translation]) -> Iterator[str]:
    """An empty line, or one that is its own translation, is trusted."""
    for one in translations:
        yield f"{1.0 if one.trust is None else one.trust:.2f} ||| {one.text}"


def _ranked(translations: Iterable[Translation], first: int) -> Iterator[str]:
    """The n-best format of Moses."""
    for number, translation in enumerate(translations, start=first):
        for candidate in translation.candidates:
            yield f"{number} ||| {candidate.text} ||| {candidate.score:.6f}"
