"""The vocabulary of one side of a model of transformers: what cuts text into pieces, and the ids of the pieces."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from regard.errors import VocabularyError, nearest
from regard.models.language_model.saved_model import read_json
from regard.translation.tokenization import SPACE
from regard.translation.vocabulary import SpecialIds

_REMEMBERED_WORDS = 1 << 17
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class PieceCutter(Protocol):
    """Cuts text into pieces: a SentencePiece model, or a file of the tokenizers library."""

    @property
    def characters(self) -> frozenset[str] | None:
        """The characters that pieces are made of; None: all."""
        ...

    def words(self, text: str) -> list[str]:
        """The words of a text in the form that is cut, "▁" at the front of each."""
        ...

    def word_pieces(self, word: str, /) -> list[str]:
        """The pieces of a word with its "▁"."""
        ...


@dataclass(frozen=True)
class LineMarks:
    """The ids that a line has beside those of its text.

    before, after: what is put before and behind every line that is not empty.
    starts: what a line may begin with to name the language that it is translated into, as ">>fra<<", by its text, and
    `like_start`, which everything that is meant to name one matches.
    unspoken: ids that are no text: they are left out where text is made of ids.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    starts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    like_start: re.Pattern[str] | None = None
    unspoken: frozenset[int] = frozenset()


class PieceVocabulary:
    """Ids of one side of a model: pieces of text by the ids of its files, and the marks around a line.

    A line may begin with the language that it is to be translated into, if `marks` has it. A text that spells a special
    id, such as "</s>", never gets it; what has no id is UNKNOWN, and is decoded as "<unk>".

    Args:
        cutter: cuts text into pieces.
        ids: of the pieces, and of special ids by their names.
        special: ids with a meaning of their own.
        marks: what a line has beside its text.
        size: how many ids the model has, where some at the end have no piece.
    """

    has_subwords = True

    def __init__(
        self, cutter: PieceCutter, ids: Mapping[str, int], special: SpecialIds, marks: LineMarks, *, size: int = 0
    ) -> None:
        self.special, self._cutter, self._ids, self._marks = special, cutter, dict(ids), marks
        self._pieces = {number: piece for piece, number in ids.items()}
        self._size = max(size, max(self._pieces) + 1)
        named = {number for start in (marks.before, *marks.starts.values()) for number in start}
        own = {special.pad, special.begin, special.end, special.unknown, *marks.after}
        self._outside = marks.unspoken | own | {number for number in named if self._pieces.get(number) != SPACE}
        self._has_bytes = any(map(_BYTE.fullmatch, self._ids))
        self._word_ids = functools.lru_cache(_REMEMBERED_WORDS)(self._encode_word)

    def __len__(self) -> int:
        return self._size

    def encode(self, line: str) -> list[int]:
        """The ids of a line with the marks around it; none for a line of white space.

        Raises:
            VocabularyError: the line begins with a language that the vocabulary does not have.
        """
        start, text = self._split(line)
        words = self._cutter.words(text) if text.strip() else []
        ids = list(itertools.chain.from_iterable(map(self._word_ids, words)))
        return [*self._marks.before, *self._marks.starts.get(start, ()), *ids, *self._marks.after] if ids else []

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """The ids of each line."""
        return [self.encode(line) for line in lines]

    def normalised(self, line: str) -> str:
        """The line in the form that is cut into pieces, with its language in front if it names one."""
        start, text = self._split(line)
        return " ".join([*filter(None, [start]), *(word.removeprefix(SPACE) for word in self._cutter.words(text))])

    def language(self, line: str) -> str:
        """What a line begins with to say which language it is translated into, as ">>fra<<"; "" where it says none."""
        return self._split(line)[0]

    def unknown_characters(self, line: str) -> list[str]:
        """The characters of a line that are in no piece, each once, in their order; white space is always known."""
        known = self._characters
        if known is None:
            return []
        text = "".join(self._cutter.words(self._split(line)[1]))
        return [sign for sign in dict.fromkeys(text) if sign != SPACE and sign not in known]

    def unknown_words(self, line: str) -> list[str]:
        """None: a word that is not known is cut into pieces that are."""
        return []

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a line; special ids and languages are dropped and UNKNOWN is "<unk>".

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        pieces = [self._piece(i) for i in ids if not self._is_outside(i)]
        return self._joined(pieces).replace(SPACE, " ").strip(" ")

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The piece of each id for display: "▁" is a space; special ids are spelled out.

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        return [self._piece(i) for i in ids]

    def words(self, ids: Sequence[int]) -> list[int]:
        """For each id, the number of its word, counted from 0; a word begins at "▁". Special ids have -1.

        Words are those of the normalised line: where a rule of the normaliser puts a space into a word, it is two.
        UNKNOWN belongs to the word that it stands in.

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        numbers, word = [], -1
        for i, following in itertools.zip_longest(ids, ids[1:]):
            piece, outside = self._piece(i), self._is_outside(i)
            if piece == SPACE and following is not None:  # a space of its own, as before another or a special id
                outside = self._is_outside(following) or self._piece(following).startswith(SPACE)
            if not outside:
                word = max(word + piece.startswith(SPACE), 0)
            numbers.append(-1 if outside else word)
        return numbers

    def is_special(self, i: int) -> bool:
        """Whether an id is no text: padding, the beginning, the end, what is unknown, a language."""
        return i in self._outside or i not in self._pieces

    def _is_outside(self, i: int) -> bool:
        """Whether an id is left out of text: a special one other than UNKNOWN, or one of no piece."""
        return i < self._size and i != self.special.unknown and self.is_special(i)

    def _split(self, line: str) -> tuple[str, str]:
        """The language that a line names, and the rest of it."""
        like, starts, text = self._marks.like_start, self._marks.starts, line.lstrip()
        found = like.match(text) if like is not None and starts else None
        if found is None:
            return "", line
        if found[0] not in starts:
            raise VocabularyError(
                f"the line begins with {found[0]}, which is no language of this model; {nearest(found[0], starts)}"
            )
        return found[0], text[found.end() :]

    def _encode_word(self, word: str) -> list[int]:
        outside, unknown = self._outside, self.special.unknown
        ids = (self._ids.get(piece, unknown) for piece in self._cutter.word_pieces(word))
        return [unknown if i in outside else i for i in ids]

    def _joined(self, pieces: list[str]) -> str:
        """The text of pieces, of which some may stand for single bytes."""
        if not self._has_bytes:
            return "".join(pieces)
        parts = (bytes([int(byte[1], 16)]) if (byte := _BYTE.fullmatch(one)) else one.encode() for one in pieces)
        return b"".join(parts).decode("utf-8", errors="replace")

    @functools.cached_property
    def _characters(self) -> frozenset[str] | None:
        known = self._cutter.characters
        return None if known is None else known & frozenset("".join(self._ids))

    def _piece(self, i: int) -> str:
        if not 0 <= i < self._size:
            raise VocabularyError(f"{i} is not an id of this vocabulary; its ids are 0 to {len(self) - 1}")
        return self._pieces.get(i, f"<{i}>")


def checked_ids(path: Path, size: int) -> dict[str, int]:
    """The ids of vocab.json, for a model with so many.

    Raises:
        CheckpointError: the file is missing, or is not JSON.
        VocabularyError: it has an id twice, none for "<unk>", or ids beyond those of the model.
    """
    ids: dict[str, Any] = read_json(path)
    wrong = next((piece for piece, number in ids.items() if type(number) is not int or number < 0), None)
    if wrong is not None or len(set(ids.values())) < len(ids):
        which = "an id twice" if wrong is None else f"{ids[wrong]!r} for {wrong!r}"
        raise VocabularyError(f"{path} has {which}; it needs one whole number of its own for each piece")
    if "<unk>" not in ids:
        raise VocabularyError(f"{path} has no id for '<unk>', which stands for what is unknown")
    check_fits(path, ids, size)
    return ids


def check_fits(path: Path, ids: Mapping[str, int], size: int) -> None:
    """Check that a model has all these ids.

    Raises:
        VocabularyError: it has fewer.
    """
    if max(ids.values(), default=0) >= size:
        raise VocabularyError(
            f"{path} has ids up to {max(ids.values()):,}, and the model has {size:,} in its table: they are not of one "
            "model"
        )
