"""Cut lines that are longer than a model was trained on into parts, at ends of sentences where there are any."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# A space after a final mark and what closes with it, unless a small letter follows, as after "e.g."; or no space at
# all after the marks of Chinese and Japanese.
_END_OF_SENTENCE = re.compile(r"""(?<=[.!?…])(?:["'”’»)\]]*)\s+(?=\S)|(?<=[。！？])(?=\S)""")
_AFTER_CLAUSE = re.compile(r"(?<=[,;:，；：、])\s*(?=\S)")
_SPACE = re.compile(r"\s+(?=\S)")


def cut_line(line: str, tokens: Callable[[str], int], above: int, longest: int) -> list[str]:
    """The parts of a line of more than `above` tokens: its sentences, and of those with more than `longest` pieces.

    A sentence is cut near its middle, again and again: behind a comma, colon or semicolon if one is in the middle half,
    else at a space, else between two characters. A line of fewer tokens is one part.

    >>> cut_line("One two. Three four, five six.", lambda text: len(text.split()), above=3, longest=3)
    ['One two.', 'Three four,', 'five six.']
    """
    if tokens(line) <= above:
        return [line]
    return [part for sentence in _sentences(line.strip()) for part in _halves(sentence, tokens, longest)]


def _sentences(line: str) -> Iterator[str]:
    start = 0
    for end in _END_OF_SENTENCE.finditer(line):
        if line[end.end()].islower():
            continue
        yield line[start : end.end()].rstrip()
        start = end.end()
    yield line[start:].rstrip()


def _halves(text: str, tokens: Callable[[str], int], longest: int) -> list[str]:
    if len(text) < 2 or tokens(text) <= longest:
        return [text]
    middle, quarter = len(text) // 2, len(text) // 4
    clauses = [found.end() for found in _AFTER_CLAUSE.finditer(text, middle - quarter, middle + quarter)]
    places = clauses or [found.end() for found in _SPACE.finditer(text)] or [middle]
    place = min(places, key=lambda place: abs(place - middle))
    left, right = text[:place].rstrip(), text[place:]
    return _halves(left, tokens, longest) + _halves(right, tokens, longest)
