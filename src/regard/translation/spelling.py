"""How a line is cut into pieces so that the pieces spell the very same line again.

Each spelling marks what the cut would lose. Where white space marks a word's beginning, "▁" stands at the front of the
word ("▁Hello" "," "▁world"). Where words are whole, "￭" stands on punctuation at the side where it touches its
neighbour ("Hello" "￭," "world"), so that a word is the same piece wherever it occurs.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol

SPACE = "▁"
JOINER = "￭"
WHITE_SPACE = " \t\n\r\f\v"

# Text may hold the marks themselves. They are swapped with noncharacters, which Unicode sets aside for use inside a
# program and which no text should hold; one that does, or holds half a surrogate pair, gets the replacement character.
_ESCAPES = str.maketrans(
    {SPACE: "\ufdd0", JOINER: "\ufdd1"}
    | dict.fromkeys(map(chr, [*range(0xFDD0, 0xFDF0), *range(0xD800, 0xE000)]), "\ufffd")
    | dict.fromkeys(WHITE_SPACE[1:], " ")
)
_NEEDS_ESCAPE = re.compile(f"[{''.join(map(chr, _ESCAPES))}]")
_UNESCAPES = str.maketrans({SPACE: " ", "\ufdd0": SPACE, "\ufdd1": JOINER})
_READABLE = str.maketrans({"\ufdd0": SPACE, "\ufdd1": JOINER})


class Spelling(Protocol):
    """One way to cut lines. A chunk is what stands between two spaces, with a mark if the spelling puts one there."""

    def chunks(self, line: str) -> list[str]:
        """The line cut at its white space: spaces, tabs and line ends; a no-break space is text."""
        ...

    def pieces(self, chunk: str) -> list[str]:
        """The chunk cut further; a model of subwords may cut these again, but never across them."""
        ...

    def line(self, pieces: Sequence[str]) -> str:
        """The line that the pieces spell."""
        ...

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """For each piece, whether white space or the line's start stands before it."""
        ...

    def label(self, piece: str) -> str:
        """The piece as a reader wants to see it."""
        ...


class CharacterSpelling:
    """Every character is a piece, and a space is the piece "▁".

    >>> spelling = CharacterSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks("ab c")]
    [['a', 'b'], ['▁', 'c']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line, from the second on with the space before them."""
        first, *rest = _words(line) or [""]
        return [first, *(SPACE + word for word in rest)]

    def pieces(self, chunk: str) -> list[str]:
        """The characters of the chunk."""
        return list(chunk)

    def line(self, pieces: Sequence[str]) -> str:
        """The characters in a row."""
        return _join_marked(pieces)

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """True for spaces, which count as part of the word they come before, and for the first piece."""
        return _begin_marked(pieces)

    def label(self, piece: str) -> str:
        """The character; a space is "▁"."""
        return piece.translate(_READABLE)


class SubwordSpelling:
    """Words with "▁" before them, their punctuation cut off.

    >>> spelling = SubwordSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks("Hello, world!")]
    [['▁Hello', ','], ['▁world', '!']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line, each with "▁" before it."""
        return [SPACE + word for word in _words(line)]

    def pieces(self, chunk: str) -> list[str]:
        """Runs of letters, and single characters of punctuation; the mark goes with the first."""
        first, *rest = _cut_off_punctuation(chunk.removeprefix(SPACE))
        return [SPACE + first, *rest]

    def line(self, pieces: Sequence[str]) -> str:
        """The pieces in a row, their marks made spaces again."""
        return _join_marked(pieces)

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """True for marked pieces and for the first."""
        return _begin_marked(pieces)

    def label(self, piece: str) -> str:
        """The piece with its mark."""
        return piece.translate(_READABLE)


class WordSpelling:
    """Whole words; punctuation is cut off and carries "￭" where no space stood.

    >>> spelling = WordSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks('Hello, ("world")!')]
    [['Hello', '￭,'], ['(￭', '"￭', 'world', '￭"', '￭)', '￭!']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line with the punctuation that touches them."""
        return _words(line)

    def pieces(self, chunk: str) -> list[str]:
        """Runs of letters, and single characters of punctuation with joiners.

        Before the first word punctuation joins to the right and after it to the left, so that an opening bracket and a
        closing one look the same wherever they stand; between two words it joins to both.
        """
        pieces = _cut_off_punctuation(chunk)
        is_word = [_is_word_character(piece[0]) for piece in pieces]
        first_word = is_word.index(True) if True in is_word else 0
        marked = []
        for i, piece in enumerate(pieces):
            if not is_word[i]:
                left = JOINER if i > first_word else ""
                right = JOINER if i < first_word or is_word[i + 1 : i + 2] == [True] else ""
                piece = left + piece + right
            marked.append(piece)
        return marked

    def line(self, pieces: Sequence[str]) -> str:
        """The pieces with spaces between, but for where a joiner stands."""
        parts = []
        for piece, begins in zip(pieces, self.begins_word(pieces), strict=True):
            parts.append((SPACE if begins and parts else "") + piece.replace(JOINER, ""))
        return "".join(parts).translate(_UNESCAPES)

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """True where neither the piece nor the one before it has a joiner at their border, and for the first."""
        borders = itertools.pairwise(pieces)
        touches = [left.endswith(JOINER) or right.startswith(JOINER) for left, right in borders]
        return [not touching for touching in [False, *touches][: len(pieces)]]

    def label(self, piece: str) -> str:
        """The word or the punctuation without joiners."""
        return piece.replace(JOINER, "").translate(_READABLE)


def spelled_with(pieces: Iterable[str]) -> set[str]:
    """The characters of text that pieces hold, of whatever spelling; and white space, which marks stand for.

    >>> sorted(spelled_with(["▁ab", "￭,"]))[-3:]
    [',', 'a', 'b']
    """
    characters = set().union(*pieces) - {SPACE, JOINER}
    return {character.translate(_READABLE) for character in characters}.union(WHITE_SPACE)


def _words(line: str) -> list[str]:
    if _NEEDS_ESCAPE.search(line):  # rare, and several times as fast to find out as to translate in vain
        line = line.translate(_ESCAPES)
    return [word for word in line.split(" ") if word]


def _join_marked(pieces: Sequence[str]) -> str:
    return "".join(pieces).removeprefix(SPACE).translate(_UNESCAPES)


def _begin_marked(pieces: Sequence[str]) -> list[bool]:
    return [i == 0 or piece.startswith(SPACE) for i, piece in enumerate(pieces)]


def _cut_off_punctuation(word: str) -> list[str]:
    pieces: list[str] = []
    for is_word, run in itertools.groupby(word, _is_word_character):
        text = "".join(run)
        pieces.extend([text] if is_word else text)
    return pieces


@functools.cache
def _is_word_character(character: str) -> bool:
    """Letters, marks, digits and invisible joiners; not punctuation, symbols, separators or control characters."""
    return unicodedata.category(character)[0] not in "PSZ" and unicodedata.category(character) != "Cc"
