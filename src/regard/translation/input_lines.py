"""Lines prepared for translation: characters that the vocabulary cannot encode removed, long lines cut into parts.

A model invents words for characters that it does not know, and drops text of lines longer than it was trained on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from regard.translation.vocabulary import LineVocabulary

_TYPEWRITER_FORMS = (
    dict.fromkeys("«»“”„‟", '"') | dict.fromkeys("‘’‚‛", "'") | dict.fromkeys("‐‑‒–—―", "-") | {"…": "..."}
)  # fmt: skip
CLOSING = ".,;:!?…)]}»”’%"
"""Marks that stand without a space behind a word."""
_NAMED = 8


@dataclass(frozen=True)
class NormalizedLine:
    """A line without the symbols that a vocabulary lacks.

    left_out: these symbols. guessed: the letters that it lacks, or the words if it is one of words. Each is named once,
    in the order in which they come.
    """

    text: str
    left_out: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()

    def warnings(self) -> Iterator[str]:
        """A sentence about unknown characters, if there are any."""
        said = []
        if self.left_out:
            said.append(f"does not know {named(self.left_out)}, which it leaves out")
        if self.guessed:
            said.append(f"does not know {named(self.guessed)}; what the translation says there is a guess")
        if said:
            yield "the source vocabulary " + ", and ".join(said)


def normalize_line(line: str, vocabulary: LineVocabulary) -> NormalizedLine:
    """Replace or remove the symbols of a line that the vocabulary cannot encode.

    Typographic quotes, dashes and spaces become the plain ones if the vocabulary knows these. Symbols, punctuation and
    what is invisible, such as the selectors and joiners of emoji, are left out, with the space that they leave over.
    Letters, digits and accents stay.

    >>> from regard.translation.vocabulary import Vocabulary, VocabularySettings
    >>> vocabulary = Vocabulary.train(['I love "you".'], VocabularySettings(kind="characters"))
    >>> normalize_line("I love “you” ❤.", vocabulary)
    NormalizedLine(text='I love "you".', left_out=('❤',), guessed=())
    """
    unknown = vocabulary.unknown_characters(line)
    if not unknown:
        return NormalizedLine(line, guessed=tuple(vocabulary.unknown_words(line)))
    plain = {character: _plain_form(character, vocabulary) for character in unknown}
    known = {ord(character): of for character, of in plain.items() if of is not None}
    unknown = [character for character in unknown if plain[character] is None]
    signs = [character for character in unknown if _is_sign(character) or is_invisible(character)]
    text = _without(signs, vocabulary.normalised(line).translate(known))
    letters = [character for character in unknown if character not in signs]
    return NormalizedLine(
        text=text,
        left_out=tuple(character for character in signs if not is_invisible(character)),
        guessed=tuple(vocabulary.unknown_words(text) or letters),
    )


def unknown_signs(line: str, vocabulary: LineVocabulary) -> list[str]:
    """The symbols, punctuation and invisible characters of a line that the vocabulary has in no form."""
    unknown = vocabulary.unknown_characters(line)
    signs = (character for character in unknown if _is_sign(character) or is_invisible(character))
    return [character for character in signs if _plain_form(character, vocabulary) is None]


def _plain_form(character: str, vocabulary: LineVocabulary) -> str | None:
    """The plain form of a typographic character, if the vocabulary has it."""
    plain = " " if unicodedata.category(character)[0] == "Z" else _TYPEWRITER_FORMS.get(character)
    return None if plain is None or vocabulary.unknown_characters(plain) else plain


def _is_sign(character: str) -> bool:
    """Whether a character is a symbol or punctuation."""
    return unicodedata.category(character)[0] in "SP"


def is_invisible(character: str) -> bool:
    """Whether a character is a control or format character, a variation selector, or an enclosing mark."""
    selects = "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
    return selects or unicodedata.category(character) in ("Cc", "Cf", "Me")


def _without(characters: list[str], text: str) -> str:
    """Remove characters: words that they separated stay separate, and no space is left before a full stop.

    >>> _without(["❤", "—"], "I ❤ you — a lot ❤."), _without(["—", "❤"], "you—me❤"), _without(["­"], "co­operate")
    ('I you a lot.', 'you me', 'cooperate')
    """
    if not characters:
        return text

    def left(found: re.Match[str]) -> str:
        at_edge = found.start() == 0 or found.end() == len(text)
        if at_edge or text[found.end()] in CLOSING:
            return ""
        return "" if all(map(is_invisible, found.group())) else " "

    return re.sub(rf"\s*(?:[{re.escape(''.join(characters))}]\s*)+", left, text)


def named(parts: Iterable[str]) -> str:
    """Some of the parts for a message, and how many more there are."""
    names = [repr(part) for part in parts]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


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
