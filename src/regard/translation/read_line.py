"""A line as a translator reads it, and the warnings about it and its translation."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from regard.translation.input_lines import NormalizedLine, normalize_line
from regard.translation.kept_text import KeptLine, take_out
from regard.translation.placeholders import PlacedLine
from regard.translation.translated_line import Candidate
from regard.translation.vocabulary import LineVocabulary, SpecialIds

_SHOWN = 100
"""Characters of a line that a warning repeats at most."""


class ReadLine(NamedTuple):
    """A line, it with placeholders, the parts of that that are kept, and the rest as the vocabulary reads it."""

    line: str
    placed: PlacedLine
    kept: KeptLine
    rest: NormalizedLine

    @classmethod
    def of(cls, placed: PlacedLine, line: str, vocabulary: LineVocabulary) -> ReadLine:
        """Read a line."""
        kept = take_out(placed.text, vocabulary)
        return cls(line, placed, kept, normalize_line(kept.text, vocabulary))

    def without_guesses(self) -> ReadLine:
        """The line of a translator that copies words which its vocabulary lacks: none of them is guessed."""
        return self._replace(rest=replace(self.rest, guessed=()))

    def warnings(self, ids: Collection[int], special: SpecialIds) -> Iterator[str]:
        """A sentence about each thing in it that is kept, guessed or unknown; ids: those of its vocabulary."""
        yield from self.kept.warnings()
        nothing_known = set(ids) <= {special.unknown, special.end}
        if ids and (nothing_known or set("".join(self.rest.text.split())) == set(self.rest.guessed)):
            text = self.rest.text.strip()
            shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
            yield f"the source vocabulary knows nothing of {shown}; the translation is a guess"
        else:
            yield from self.rest.warnings()


def length_warnings(tokens: int, parts: int, longest_trained: int | None) -> Iterator[str]:
    """A sentence about a line that is translated in parts, or is longer than those that the model was trained on."""
    if parts > 1:
        yield (
            f"it has {tokens:,} tokens, more than are translated at once, and is translated in {parts:,} parts, "
            "each by itself; give one sentence a line"
        )
    elif longest_trained is not None and tokens > longest_trained:
        yield (
            f"it has {tokens:,} tokens, and the model was trained on sentences of {longest_trained:,} at most: the "
            "translation may leave out much of it; give one sentence a line"
        )


def end_warnings(best: Candidate, parts: int) -> Iterator[str]:
    """A sentence about a translation without an end."""
    if best.finished:
        return
    if parts > 1:
        yield "the translation of one of its parts did not end, and was cut"
    else:
        yield f"the translation did not end within {len(best.tokens)} tokens and was cut"
