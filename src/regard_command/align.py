"""`regard align`: word links between sentences and their translations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.options import (
    BatchSize,
    Device,
    Head,
    LanguageCodes,
    Layer,
    Which,
    check_own_folder,
    languages_of,
    translator_folder,
)
from regard_command.stdio import emit

if TYPE_CHECKING:
    from regard.heads.word_alignment import Link
    from regard.translation.alignment_choice import AlignmentChoice
    from regard.translation.translator import Translator

PAIRS_AT_ONCE = 1024
"""Pairs whose weights are held at once."""


def align(
    source: Annotated[Path, typer.Option(metavar="FILE", show_default=False, help="Sentences, one a line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", show_default=False, help="Their translations, line by line.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=translator_folder,
            help="A translator, of `regard train` or of transformers, or the name of one that regard comes with, as "
            "english_french, whose attention links the words. [default: none; links are learned from the text alone]",
        ),
    ] = None,
    reverse: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            parser=translator_folder,
            help="A translator of the other direction; links are those of both, grown.",
        ),
    ] = None,
    also: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="SOURCE TARGET", help="Two more files of sentences to learn links from, not to print."),
    ] = None,
    gold: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Links by hand, 1-2 sure and 1p2 possible: print the alignment error rate."),
    ] = None,
    first: Annotated[int, typer.Option(min=0, max=1, help="The number of the first word in the file of --gold.")] = 0,
    choose: Annotated[
        bool,
        typer.Option(
            "--choose", help="Choose the heads of --checkpoint that link as the text alone does, and keep the choice."
        ),
    ] = False,
    teach: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Teach a head of --checkpoint to link as the text alone does, and write the translator here.",
        ),
    ] = None,
    updates: Annotated[int, typer.Option(min=1, help="Steps of --teach, of 64 pairs each.")] = 300,
    languages: LanguageCodes = None,
    which: Which = "best",
    device: Device = "cpu",
    batch_size: BatchSize = None,
    layer: Layer = None,
    head: Head = None,
) -> None:
    """Link the words of sentences and translations.

    Prints the links of each pair in Pharaoh format: 1-2 links source word 1 with target word 2. Words are what white
    space separates, counted from 0. A pair with an empty side gives an empty line.

    Without --checkpoint links are learned from the text itself, and from --also, by counting which words stand in pairs
    of sentences (IBM model 1 and a hidden Markov model): the more text, the better; some thousands of pairs are enough
    to be useful.

    With it each word of the translation is linked with the source word that has the greatest attention weight: in the
    heads that --choose has found for this model, or of a Transformer in the mean over all layers and heads, or in
    --layer and --head. Heads are chosen once, by the links that are learned from the text, and nothing is printed.

    --teach trains a head to link words, while the model goes on translating: the one that was chosen, --layer and
    --head, or head 0 of the last layer but one. The translator that it writes aligns by that head.
    """
    from regard.heads.word_alignment import format_pharaoh

    _check(checkpoint, also, choose, teach, reverse=reverse, layer=layer, head=head)
    if choose and checkpoint is not None:
        check_own_folder(checkpoint, "the choice")
    from regard.translation.taught_head import taught_model, write_taught
    from regard.translation.translator import Translator

    translator = Translator.load(checkpoint, which, device, languages_of(languages)) if checkpoint else None
    sources, targets = _read_pair(source, target)
    if translator is None:
        found = _learned(sources, targets, also)
    elif choose:
        _choose(translator, checkpoint or Path(), sources, targets, _learned(sources, targets, also))
        return
    elif teach is not None:
        place = None if layer is None and head is None else (layer, head or 0)
        choice = _teach(translator, (sources, targets), _learned(sources, targets, also), place, updates)
        write_taught(checkpoint or Path(), which, teach, taught_model(translator.model), choice.layer or 0)
        choice.save(teach)
        return
    else:
        found = _seen(translator, sources, targets, batch_size, layer, head)
    if reverse is not None:
        backwards = Translator.load(reverse, which, device)
        found = _grown(found, _seen(backwards, targets, sources, batch_size, None, None))
    emit(format_pharaoh(links) for links in found)
    if gold is not None:
        _report(found, gold, first, sources, targets)


def _check(
    checkpoint: Path | None,
    also: tuple[Path, Path] | None,
    choose: bool,
    teach: Path | None,
    **of_models: Path | int | None,
) -> None:
    """Refuse options without effect, and a folder that holds something."""
    if teach is not None:
        from regard.translation.native_marian import is_native_marian
        from regard.translation.pretrained_export import check_new_folder

        check_new_folder(teach)
        if checkpoint is not None and is_native_marian(checkpoint):
            raise CommandError(
                f"--teach writes a copy of {checkpoint}, and files of Marian are read alone: teach a model of "
                "transformers, or one that was trained here"
            )
    if checkpoint is None:
        for name in (
            ["choose"] * choose
            + ["teach"] * (teach is not None)
            + [name for name, value in of_models.items() if value is not None]
        ):
            raise CommandError(f"--{name} is about the attention of a translator: add --checkpoint FOLDER")
    elif also is not None and not choose and teach is None:
        raise CommandError("--also is text to learn links from, and a translator has learned: leave it out")
    if choose:
        for name in [name for name, value in of_models.items() if value is not None]:
            raise CommandError(f"--choose finds the layer and head of --checkpoint by itself: leave --{name} out")
    if teach is not None and (choose or of_models["reverse"] is not None):
        raise CommandError(
            f"--teach writes a translator and prints no links: leave --{'choose' if choose else 'reverse'} out"
        )


def _read_pair(source: Path, target: Path) -> tuple[Sequence[str], Sequence[str]]:
    from regard.translation.corpus import read_lines

    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise CommandError(
            f"the sides do not line up: {source} has {len(sources):,} lines and {target} has {len(targets):,}; "
            "line i of one needs to translate line i of the other"
        )
    return sources, targets


def _learned(sources: Sequence[str], targets: Sequence[str], also: tuple[Path, Path] | None) -> list[list[Link]]:
    """The links of each pair that are learned from these and more."""
    from regard.translation.word_aligner import align_words

    more = ([], []) if also is None else _read_pair(*also)
    sides = ([line.split() for line in [*one, *other]] for one, other in zip((sources, targets), more, strict=True))
    return align_words(*sides)[: len(sources)]


def _seen(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    batch_size: int | None,
    layer: int | None,
    head: int | None,
) -> list[list[Link]]:
    """The links of each pair by the greatest attention weight."""
    found: list[list[Link]] = []
    for start in range(0, len(sources), PAIRS_AT_ONCE):
        some = slice(start, start + PAIRS_AT_ONCE)
        pairs = translator.align(
            sources[some], targets[some], batch_size=batch_size, first_line=start + 1, layer=layer, head=head
        )
        found += [list(pair.links) for pair in pairs]
    return found


def _grown(forth: list[list[Link]], back: list[list[Link]]) -> list[list[Link]]:
    """The links of both directions, and those of one beside them."""
    from regard.heads.word_alignment import grow_diag

    turned = [{(source, target) for target, source in links} for links in back]
    return [
        sorted(grow_diag(other.intersection(one), other.union(one))) for one, other in zip(forth, turned, strict=True)
    ]


def _choose(
    translator: Translator,
    folder: Path,
    sources: Sequence[str],
    targets: Sequence[str],
    links: list[list[Link]],
) -> None:
    """Choose the heads of a translator by links, and keep the choice in its folder."""
    choice = translator.choose_alignment(sources[:PAIRS_AT_ONCE], targets[:PAIRS_AT_ONCE], links[:PAIRS_AT_ONCE])
    choice.save(folder)
    of = "the mean of all layers" if choice.layer is None else f"layer {choice.layer}"
    of += ", the mean of its heads" if choice.head is None else f", head {choice.head}"
    typer.echo(
        f"{of}, at the step that {choice.step} a word: alignment error rate {choice.error_rate:.1%} against the links "
        f"that the text teaches, over {choice.pairs:,} pairs; kept in {folder}",
        err=True,
    )


def _teach(
    translator: Translator,
    text: tuple[Sequence[str], Sequence[str]],
    links: list[list[Link]],
    place: tuple[int | None, int] | None,
    updates: int,
) -> AlignmentChoice:
    """Teach a head of a translator by links, and say what it has learned."""
    from regard.heads.word_alignment import alignment_error_rate
    from regard.models.decoded_target import SourceHead
    from regard.translation.taught_head import Teaching

    head = None if place is None else SourceHead(*place)
    choice = translator.teach_alignment(*text, links, head, Teaching(updates))
    shown = slice(PAIRS_AT_ONCE)
    pairs = translator.align(text[0][shown], text[1][shown])
    rate = alignment_error_rate([pair.links for pair in pairs], links[shown], links[shown])
    typer.echo(
        f"layer {choice.layer}, head {choice.head}, taught by {choice.pairs:,} pairs: alignment error rate {rate:.1%} "
        f"against the links that the text teaches, of the first {len(pairs):,}",
        err=True,
    )
    return choice


def _report(found: list[list[Link]], gold: Path, first: int, sources: Sequence[str], targets: Sequence[str]) -> None:
    """The alignment error rate on standard error, beside that of the diagonal."""
    from regard.heads.word_alignment import alignment_error_rate, diagonal_links
    from regard.translation.corpus import read_pharaoh

    known = read_pharaoh(gold, first=first)
    if len(known) != len(found):
        raise CommandError(f"{gold} has the links of {len(known):,} pairs, and there are {len(found):,}")
    sure, possible = [links.sure for links in known], [links.possible for links in known]
    diagonal = [diagonal_links(len(s.split()), len(t.split())) for s, t in zip(sources, targets, strict=True)]
    rate, beside = (alignment_error_rate(links, sure, possible) for links in (found, diagonal))
    typer.echo(f"alignment error rate {rate:.1%} over {len(found):,} pairs; of the diagonal {beside:.1%}", err=True)
