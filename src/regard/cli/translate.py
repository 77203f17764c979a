"""`regard translate`: lines in, lines out, as they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import BatchSize, Checkpoint, Device, Head, Layer, Which
from regard.cli.streams import arriving_lines, emit, standard_input

if TYPE_CHECKING:
    from regard.translation.translator import Translation


def translate(
    checkpoint: Checkpoint,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="One line to translate; without it, standard input is.")
    ] = None,
    n_best: Annotated[
        int | None, typer.Option(min=1, help="Print so many translations of a line, as LINE ||| TEXT ||| SCORE.")
    ] = None,
    beam: Annotated[
        int | None, typer.Option(min=1, help="Beams; 1 is greedy search. [default: the experiment's]")
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(min=0.0, help="α of log P / ((5 + length) / 6)^α. [default: the experiment's]"),
    ] = None,
    attention: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep where the best translations looked: pictures (.png) or arrays (.npz)."),
    ] = None,
    which: Which = "best",
    device: Device = "cpu",
    batch_size: BatchSize = 64,
    layer: Layer = None,
    head: Head = None,
) -> None:
    """Translate one line, or standard input.

    Lines are translated as they arrive: one that is typed is answered at once. An empty line gives an empty line.
    LINE of --n-best counts from 0. Of several lines, --attention FILE.png draws the first to FILE.png and the others to
    FILE-2.png, FILE-3.png and so on; FILE.npz has all, as 1.weights, 1.source, 1.target, 2.weights and so on.

    Of a Transformer the pictures are of --layer and --head, or of the mean over all; the arrays have all of them,
    1.weights as [target, layer, head, source], and 1.self_weights where it looked at its own words.
    """
    from regard.cli.attention import attention_file
    from regard.translation.experiment import Experiment
    from regard.translation.runs import RunFolder
    from regard.translation.translator import Translator

    kept = attention_file(attention, layer, head)
    translator = Translator.load(checkpoint, which, device)
    told = {"n_best": n_best or 1, "beam": beam, "length_penalty": length_penalty}
    overrides = [f"search.{key}={value}" for key, value in told.items() if value is not None]
    search = Experiment.load(RunFolder(checkpoint).experiment, overrides).search
    number = 1
    for lines in [[text]] if text is not None else arriving_lines(standard_input()):
        translations = translator.translate(
            lines, search=search, batch_size=batch_size, first_line=number, observe=attention is not None
        )
        for warning in (warning for translation in translations for warning in translation.warnings):
            typer.echo(warning, err=True)
        emit(_plain(translations) if n_best is None else _ranked(translations, number - 1))
        for line, translation in enumerate(translations, start=number):
            kept.add(line, translation)
        number += len(lines)
    kept.close()


def _plain(translations: Iterable[Translation]) -> Iterator[str]:
    return (translation.text for translation in translations)


def _ranked(translations: Iterable[Translation], first: int) -> Iterator[str]:
    """The n-best format of Moses."""
    for number, translation in enumerate(translations, start=first):
        for candidate in translation.candidates:
            yield f"{number} ||| {candidate.text} ||| {candidate.score:.6f}"
