"""The vocabulary of one side of a Marian model of transformers: a SentencePiece model, and ids of its pieces."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.errors import VocabularyError, nearest
from regard.models.language_model.saved_model import read_json
from regard.translation.sentencepiece_file import SentencePieceModel
from regard.translation.tokenization import SPACE
from regard.translation.vocabulary import SpecialIds

_LANGUAGE = re.compile(r">>[^<>\s]*<<")
_REMEMBERED_WORDS = 1 << 17


class MarianVocabulary:
    """Ids of one side of a Marian model: pieces of a SentencePiece model by the ids of vocab.json.

    A source ends with END, as the model was trained. A line may begin with the language that it is to be translated
    into, as ">>fra<<", if the vocabulary has it. A text that spells a special id, such as "</s>", never gets it; what
    has no id is UNKNOWN, and is decoded as "<unk>".

    Args:
        model: cuts text into pieces.
        ids: of the pieces.
        special: ids with a meaning of their own.
        after: what is put behind every line that is not empty: END for a source.
    """

    has_subwords = True

    def __init__(
        self, model: SentencePieceModel, ids: Mapping[str, int], special: SpecialIds, after: tuple[int, ...] = ()
    ) -> None:
        self.special, self._model, self._ids, self._after = special, model, dict(ids), after
        self._pieces = {number: piece for piece, number in ids.items()}
        self._languages = {piece: number for piece, number in ids.items() if _LANGUAGE.fullmatch(piece)}
        self._marks = {special.pad, special.begin, special.end, special.unknown, *self._languages.values()}
        self._word_ids = functools.lru_cache(_REMEMBERED_WORDS)(self._encode_word)

    def __len__(self) -> int:
        return max(self._pieces) + 1

    def encode(self, line: str) -> list[int]:
        """The ids of a line, those of a source with END behind; none for a line of white space.

        Raises:
            VocabularyError: the line begins with a language that the vocabulary does not have.
        """
        language, text = self._split(line)
        ids = list(itertools.chain.from_iterable(map(self._word_ids, text.split(" ")))) if text.strip() else []
        return [*language, *ids, *self._after] if ids else []

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """The ids of each line."""
        return [self.encode(line) for line in lines]

    def normalised(self, line: str) -> str:
        """The line in the form that is cut into pieces, with its language in front if it names one."""
        language, text = self._split(line)
        return " ".join([*(self._pieces[code] for code in language), text])

    def language(self, line: str) -> str:
        """What a line begins with to say which language it is translated into, as ">>fra<<"; "" where it says none."""
        return "".join(self._pieces[code] for code in self._split(line)[0])

    def unknown_characters(self, line: str) -> list[str]:
        """The characters of a line that are in no piece, each once, in their order; white space is always known."""
        text = self._split(line)[1]
        return [sign for sign in dict.fromkeys(text) if sign != " " and sign not in self._characters]

    def unknown_words(self, line: str) -> list[str]:
        """None: a word that is not known is cut into pieces that are."""
        return []

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a line; PAD, BEGIN, END and languages are dropped and UNKNOWN is "<unk>".

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        left_out = self._marks - {self.special.unknown}
        return "".join(self._piece(i) for i in ids if i not in left_out).replace(SPACE, " ").strip(" ")

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
        for i in ids:
            piece, outside = self._piece(i), i in self._marks and i != self.special.unknown
            if not outside:
                word = max(word + piece.startswith(SPACE), 0)
            numbers.append(-1 if outside else word)
        return numbers

    def is_special(self, i: int) -> bool:
        """Whether an id is no text: padding, the beginning, the end, what is unknown, a language."""
        return i in self._marks

    def _split(self, line: str) -> tuple[list[int], str]:
        """The language that a line names, and its normalised text."""
        found = _LANGUAGE.match(line.lstrip()) if self._languages else None
        if found is None:
            return [], self._model.normalised(line)
        if found[0] not in self._languages:
            raise VocabularyError(
                f"the line begins with {found[0]}, which is no language of this model; "
                f"{nearest(found[0], self._languages)}"
            )
        return [self._languages[found[0]]], self._model.normalised(line.lstrip()[found.end() :])

    def _encode_word(self, word: str) -> list[int]:
        marks, unknown = self._marks, self.special.unknown
        ids = (self._ids.get(piece, unknown) for piece in self._model.pieces(word))
        return [unknown if i in marks else i for i in ids]

    @functools.cached_property
    def _characters(self) -> frozenset[str]:
        return self._model.characters & frozenset("".join(self._ids))

    def _piece(self, i: int) -> str:
        if i not in self._pieces:
            raise VocabularyError(f"{i} is not an id of this vocabulary; its ids are 0 to {len(self) - 1}")
        return self._pieces[i]


def read_marian_ids(path: Path, size: int) -> dict[str, int]:
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
    if max(ids.values()) >= size:
        raise VocabularyError(
            f"{path} has ids up to {max(ids.values()):,}, and the model has {size:,} in its table: they are not of one "
            "model"
        )
    return ids
