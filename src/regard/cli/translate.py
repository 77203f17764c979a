"""`regard translate`: translates its arguments, or standard input line by line, and saves the attention weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import typer

from regard.cli.options import BatchSize, Device, Head, LanguageCodes, Layer, Which, languages_of
from regard.cli.stdio import arriving_lines, emit, standard_input
from regard.errors import ConfigurationError, CorpusError, require
from regard.utils.atomic_files import atomic_write

if TYPE_CHECKING:
    from regard.translation.settings import SearchSettings
    from regard.translation.translator import Translation, Translator


def translate(
    sentences: Annotated[
        list[str] | None, typer.Argument(metavar="SENTENCE", help="To translate; without any, standard input is.")
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            help="Folder of a training run, as `regard train` made it, or of a translator of transformers. [default: "
            "English to French, as installed]",
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
    split_above: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="TOKENS",
            help="Translate a line of more tokens in parts, sentence by sentence; 0 translates every line whole. "
            "[default: the longest sentence of the training]",
        ),
    ] = None,
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
    batch_size: BatchSize = 64,
    layer: Layer = None,
    head: Head = None,
) -> None:
    """Translate sentences, or standard input line by line.

    Lines are translated as they arrive: one that is typed is answered at once. An empty line gives an empty line.
    Without --checkpoint it is the small model for everyday sentences, English to French, that regard comes with.

    Tags, signs that the model has never seen, such as emoji, and words of more than 200 characters are kept as they
    are. Standard error says so, by the number of the line, and also which letters it does not know, and which lines are
    longer than any that it was trained on: these are translated sentence by sentence, and sentences of more than twice
    as many tokens in pieces.

    LINE of --n-best counts from 0. Of several lines, --attention FILE.png draws the first to FILE.png and the others to
    FILE-2.png, FILE-3.png and so on; FILE.npz has all, as 1.weights, 1.source, 1.target, 2.weights and so on.

    Of a Transformer the pictures are of --layer and --head, or of the mean over all; the arrays have all of them,
    1.weights as [target, layer, head, source], and 1.self_weights for the attention to its own words.
    """
    from regard.translation.run_folder import ENGLISH_FRENCH
    from regard.translation.translator import Translator

    _check(sentences, attention, layer=layer, head=head)
    kept = attention_file(attention, layer, head)
    folder = checkpoint or ENGLISH_FRENCH
    translator = Translator.load(folder, which, device, languages_of(languages))
    told = {"n_best": n_best or 1, "beam": beam, "length_penalty": length_penalty}
    search = _search(folder, translator, {key: value for key, value in told.items() if value is not None})
    if checkpoint is None:
        typer.echo("English to French, by the model that regard comes with; --checkpoint names another", err=True)
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
        )
        for warning in (warning for translation in translations for warning in translation.warnings):
            typer.echo(warning, err=True)
        emit(_plain(translations) if n_best is None else _ranked(translations, number - 1))
        for line, translation in enumerate(translations, start=number):
            kept.add(line, translation)
        number += len(lines)
    kept.close()


def _search(folder: Path, translator: Translator, told: dict[str, Any]) -> SearchSettings:
    """The settings of the folder's search, but for those that were told."""
    from regard.translation.experiment import Experiment
    from regard.translation.pretrained_search import with_choices
    from regard.translation.pretrained_translator import is_pretrained
    from regard.translation.run_folder import RunFolder

    if is_pretrained(folder):
        return with_choices(translator.search, told)
    return Experiment.load(RunFolder(folder).experiment, [f"search.{key}={told[key]}" for key in told]).search


def _check(sentences: list[str] | None, attention: Path | None, **chosen: int | None) -> None:
    """Refuse empty sentences and options without effect before any model is loaded."""
    for number, sentence in enumerate(sentences or [], start=1):
        if not sentence.strip():
            raise CorpusError(
                f"sentence {number} of {len(sentences or [])} is empty; give text to translate, or give no sentence "
                "and let standard input have the lines"
            )
    for name, value in chosen.items():
        if value is not None and (attention is None or attention.suffix == ".npz"):
            raise ConfigurationError(
                f"--{name} chooses what is drawn, and no picture was asked for: add --attention FILE.png, or leave it "
                "out; FILE.npz has all layers and heads"
            )


def _plain(translations: Iterable[Translation]) -> Iterator[str]:
    return (translation.text for translation in translations)


def _ranked(translations: Iterable[Translation], first: int) -> Iterator[str]:
    """The n-best format of Moses."""
    for number, translation in enumerate(translations, start=first):
        for candidate in translation.candidates:
            yield f"{number} ||| {candidate.text} ||| {candidate.score:.6f}"


class AttentionFile(Protocol):
    """Writer of the attention weights of translations, added one by one. Each file appears only when it is complete."""

    def add(self, line: int, translation: Translation) -> None:
        """Add the weights of a line's best candidate; an empty line has none."""
        ...

    def close(self) -> None:
        """Finish the file after the last line."""
        ...


def attention_file(path: Path | None, layer: int | None = None, head: int | None = None) -> AttentionFile:
    """The writer for a file of this name; heat maps are of one layer and head, or of the mean over them.

    Raises:
        ConfigurationError: the name ends in neither .png nor .npz.
        MissingExtra: matplotlib is not installed, and pictures are asked for.
    """
    if path is None:
        return NoAttentionFile()
    if path.suffix == ".png":
        return HeatmapFiles(path, layer, head)
    if path.suffix != ".npz":
        raise ConfigurationError(
            f"--attention {path}: the name needs to end in .png, for pictures, or in .npz, for the weights as arrays"
        )
    return WeightArrays(path)


class NoAttentionFile:
    """Writes nothing: the command has no --attention."""

    def add(self, line: int, translation: Translation) -> None:
        """Ignore the line."""

    def close(self) -> None:
        """Do nothing."""


class HeatmapFiles:
    """One heat map a line: FILE.png for the first, FILE-2.png for the second."""

    def __init__(self, path: Path, layer: int | None, head: int | None) -> None:
        require("matplotlib", extra="plots")  # now, and not after the first translation
        self._path, self._layer, self._head = path, layer, head

    def add(self, line: int, translation: Translation) -> None:
        """Draw the heat map of a line."""
        if not translation.candidates:
            return
        path = self._path if line == 1 else self._path.with_stem(f"{self._path.stem}-{line}")
        with atomic_write(path) as partial:
            translation.heatmap(layer=self._layer, head=self._head).savefig(partial, format="png", dpi=150)

    def close(self) -> None:
        """Do nothing: `add` has written every picture."""


class WeightArrays:
    """One .npz file with, for line 1, its weights [T, S] and its tokens: `1.weights`, `1.source`, `1.target`.

    Of a model with layers and heads the weights are [T, layers, heads, S], and `1.self_weights` is beside them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays: dict[str, np.ndarray] = {}

    def add(self, line: int, translation: Translation) -> None:
        """Collect the arrays of a line."""
        if not translation.candidates:
            return
        best = translation.candidates[0]
        self._arrays[f"{line}.weights"] = best.weights.float().numpy()
        if best.self_weights.shape[1]:
            self._arrays[f"{line}.self_weights"] = best.self_weights.float().numpy()
        self._arrays[f"{line}.source"] = np.array(translation.source_tokens)
        self._arrays[f"{line}.target"] = np.array(best.tokens)

    def close(self) -> None:
        """Write the arrays of all lines."""
        with atomic_write(self._path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **self._arrays)
