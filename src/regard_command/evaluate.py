"""`regard test`: translates a test set and scores it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.options import (
    BatchSize,
    Checkpoint,
    Device,
    LanguageCodes,
    Overrides,
    Which,
    check_own_folder,
    languages_of,
)
from regard_command.stdio import emit

if TYPE_CHECKING:
    from regard.translation.corpus import ParallelText
    from regard.translation.experiment import Experiment
    from regard.translation.translated_line import Translation
    from regard.translation.translator import Translator


def evaluate(
    checkpoint: Checkpoint,
    source: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines to translate, in place of data.test.")
    ] = None,
    target: Annotated[Path | None, typer.Option(metavar="FILE", help="Their translations.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the translations go. [default: test.hypotheses.txt in the run folder]"
        ),
    ] = None,
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Score without regard to case.")] = False,
    tokenised: Annotated[
        bool, typer.Option("--tokenised", help="Score text in the tokens of Moses, too, as fairseq does.")
    ] = False,
    tokenize: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Tokeniser of sacreBLEU for BLEU: 13a for languages with spaces between words, zh, ja-mecab, ko-mecab "
            "(the latter two need packages of their own), char for any.",
        ),
    ] = "13a",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Learn from this text how far translations can be trusted, and keep it with the model: others then "
            "get a warning where they are likely to be poor.",
        ),
    ] = False,
    languages: LanguageCodes = None,
    which: Which = "best",
    device: Device = "cpu",
    batch_size: BatchSize = None,
    overrides: Overrides = None,
) -> None:
    """Translate and score a test set.

    Prints BLEU and chrF with their signatures, and writes the translations to a file. Of an experiment's keys only
    those of data and search can be set here, for instance --set search.beam=10.

    BLEU of a language without spaces between words, or of Korean, needs another tokeniser: --tokenize ko-mecab or char.

    With --tokenised there is a third score: BLEU of the text in the tokens of Moses for data.target_language, not
    smoothed, for comparison with publications that scored so; those that lower-cased their text need --lowercase, too.
    """
    from regard.translation.bleu import check_tokenizer
    from regard.translation.run_folder import RunFolder
    from regard.translation.translator import Translator
    from regard.translation.trust import check_count
    from regard.utils.atomic_files import atomic_write

    check_tokenizer(tokenize)
    if calibrate or output is None:
        check_own_folder(checkpoint, "what --calibrate learns" if calibrate else "translations without --output FILE")
    translator = Translator.load(checkpoint, which, device, languages_of(languages))
    run = RunFolder(checkpoint)
    if not run.experiment.exists():  # a model of transformers, or of Marian
        _check_pretrained(tokenised, overrides or [])
        text, search, language, name = _named_text(source, target), translator.search, None, str(checkpoint)
    else:
        experiment = _experiment(run.experiment, overrides or [])
        language = _language(experiment) if tokenised else None
        text, search = _text(experiment, source, target), experiment.search
        name = f"the experiment {experiment.name!r}"
    if text is None:
        raise CommandError(f"{name} has no data.test; name two files with --source and --target")
    if calibrate:
        check_count(len(text.sources))
    if text.dropped_empty:
        typer.echo(f"{text.dropped_empty:,} pairs with an empty side are left out", err=True)
    path = output or checkpoint / "test.hypotheses.txt"
    start = time.perf_counter()
    with atomic_write(path) as partial:  # made before the work, which would be lost where it cannot be
        translations = translator.translate(text.sources, search=search, batch_size=batch_size, observe=False)
        hypotheses = [translation.text for translation in translations]
        partial.write_text("".join(f"{line}\n" for line in hypotheses), encoding="utf-8")
    seconds = time.perf_counter() - start
    if calibrate:
        _calibrate(translator, translations, text.targets, checkpoint)
    for warning in (warning for translation in translations for warning in translation.warnings):
        typer.echo(f"{text.source_name}, {warning}", err=True)
    speed = sum(len(line.split()) for line in hypotheses) / seconds
    typer.echo(f"{len(hypotheses):,} sentences in {seconds:.1f} s, {speed:,.0f} words a second: {path}", err=True)
    emit(_scores(hypotheses, text.targets, language, lowercase, tokenize))


def _calibrate(translator: Translator, translations: list[Translation], references: list[str], folder: Path) -> None:
    """Learn how far translations can be trusted, and keep it in the folder of the model."""
    trust = translator.calibrate(translations, references)
    trust.save(folder)
    typer.echo(
        f"trust: predicted and true chrF of {trust.pairs:,} sentences, each predicted without itself, correlate by "
        f"{trust.correlation:.2f}; kept in {folder}",
        err=True,
    )


def _check_pretrained(tokenised: bool, overrides: list[str]) -> None:
    """Refuse, of a model that was not trained here, options that change an experiment or read it."""
    if overrides or tokenised:
        wrong = f"--set {overrides[0]}" if overrides else "--tokenised"
        raise CommandError(f"{wrong} is of an experiment, and this model has none: leave it out")


def _scores(
    hypotheses: list[str], references: list[str], language: str | None, lowercase: bool, tokenize: str
) -> Iterator[str]:
    from regard.translation.bleu import score, tokenised_bleu

    yield str(score(hypotheses, references, lowercase=lowercase, tokenize=tokenize))
    if language is not None:
        bleu, signature = tokenised_bleu(hypotheses, references, language=language, lowercase=lowercase)
        yield f"BLEU {bleu:5.2f}  {signature}"


def _experiment(path: Path, overrides: list[str]) -> Experiment:
    """The experiment of a run with overrides of data and search; others are refused."""
    from regard.translation.experiment import Experiment

    experiment = Experiment.load(path, overrides)
    settled = [
        key
        for key in experiment.differences(Experiment.load(path))
        # Another split would test on sentences of the training.
        if key.split(".")[0] not in ("data", "search") or key.startswith("data.split")
    ]
    if settled:
        raise CommandError(
            f"--set {settled[0]}: the training has settled this; now only keys of data and search can be set, "
            "and the split of the data cannot"
        )
    return experiment


def _language(experiment: Experiment) -> str:
    """The language of Moses tokenisation, checked before anything is translated."""
    from regard.errors import require

    require("sacremoses", extra="moses")
    if experiment.data.target_language is None:
        raise CommandError(
            "--tokenised: each language has tokens of its own, and the experiment does not say which it is; name it, "
            "for instance --set data.target_language=de"
        )
    return experiment.data.target_language


def _text(experiment: Experiment, source: Path | None, target: Path | None) -> ParallelText | None:
    """The text of two files, or without them that of the experiment, if it has one."""
    from regard.translation.data_split import evaluation_text

    return _named_text(source, target) or evaluation_text(experiment.data)


def _named_text(source: Path | None, target: Path | None) -> ParallelText | None:
    from regard.translation.corpus import ParallelText
    from regard.translation.settings import TextFiles

    if source and target:
        # Files named on the command line are relative to where it is given, not to data.folder.
        return ParallelText.read(TextFiles(source=source.absolute(), target=target.absolute()))
    if source or target:
        given, missing = ("--source", "--target") if source else ("--target", "--source")
        raise CommandError(f"{given} needs {missing} beside it: line i of one translates line i of the other")
    return None
