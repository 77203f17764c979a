"""`regard align`: word links between sentences and their translations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.options import BatchSize, Checkpoint, Device, Head, LanguageCodes, Layer, Which, languages_of
from regard_command.stdio import emit

PAIRS_AT_ONCE = 1024
"""Links are printed after so many pairs."""


def align(
    checkpoint: Checkpoint,
    source: Annotated[Path, typer.Option(metavar="FILE", show_default=False, help="Sentences, one a line.")],
    target: Annotated[Path, typer.Option(metavar="FILE", show_default=False, help="Their translations, line by line.")],
    languages: LanguageCodes = None,
    which: Which = "best",
    device: Device = "cpu",
    batch_size: BatchSize = 64,
    layer: Layer = None,
    head: Head = None,
) -> None:
    """Link the words of sentences and translations.

    Prints the links of each pair in Pharaoh format: 1-2 links source word 1 with target word 2. Words are what white
    space separates, counted from 0. Each word of the translation is linked with the source word that has the greatest
    attention weight: of a Transformer in the mean over all layers and heads, unless one is chosen. A pair with an
    empty side gives an empty line.
    """
    from regard.heads.word_alignment import format_pharaoh
    from regard.translation.corpus import read_lines
    from regard.translation.translator import Translator

    translator = Translator.load(checkpoint, which, device, languages_of(languages))
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise CommandError(
            f"the sides do not line up: {source} has {len(sources):,} lines and {target} has {len(targets):,}; "
            "line i of one needs to translate line i of the other"
        )
    for start in range(0, len(sources), PAIRS_AT_ONCE):
        some = slice(start, start + PAIRS_AT_ONCE)
        pairs = translator.align(
            sources[some], targets[some], batch_size=batch_size, first_line=start + 1, layer=layer, head=head
        )
        emit(format_pharaoh(pair.links) for pair in pairs)
