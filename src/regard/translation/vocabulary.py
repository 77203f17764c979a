"""Vocabularies: text to ids, and back to the same text."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from regard.errors import VocabularyError
from regard.translation.tokenization import (
    SPACE,
    CharacterSpelling,
    Segmenter,
    Spelling,
    Subwords,
    SubwordSpelling,
    WordSpelling,
    bpe_segmenter,
    learn_bpe,
    learn_unigram,
    spelled_with,
    unigram_segmenter,
)
from regard.utils.atomic_files import atomic_write

PAD, UNKNOWN, BEGIN, END = range(4)
SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")


@dataclass(frozen=True)
class SpecialIds:
    """The ids with a meaning of their own: of padding, of what is unknown, before a translation, and at its end.

    Vocabularies made here have them at 0 to 3. Those of other libraries have them elsewhere, and one id may be two of
    them: Marian's padding is what is before a translation. `never_said` are those that no translation holds. `first`
    is the token that every translation begins with, as models of many languages have it; None: any.
    """

    pad: int = PAD
    unknown: int = UNKNOWN
    begin: int = BEGIN
    end: int = END
    never_said: tuple[int, ...] = (PAD, BEGIN)
    first: int | None = None


OWN_IDS = SpecialIds()
"""Those of `Vocabulary`."""


class LineVocabulary(Protocol):
    """Text to ids and back, as a `Translator` needs it: `Vocabulary`, or that of a model from elsewhere."""

    @property
    def special(self) -> SpecialIds:
        """Ids with a meaning of their own."""
        ...

    @property
    def has_subwords(self) -> bool:
        """Whether words are cut into pieces."""
        ...

    def __len__(self) -> int: ...

    def encode(self, line: str) -> list[int]:
        """The ids of a line as the model reads it; none for a line of white space."""
        ...

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """The ids of each line."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a line, without special ids."""
        ...

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The piece of each id for display."""
        ...

    def words(self, ids: Sequence[int]) -> list[int]:
        """For each id, the number of its word; -1 for special ids."""
        ...

    def is_special(self, i: int) -> bool:
        """Whether an id is no text."""
        ...

    def normalised(self, line: str) -> str:
        """The line in the form that is cut into pieces."""
        ...

    def language(self, line: str) -> str:
        """What a line begins with to say which language it is translated into; "" where it says none."""
        ...

    def unknown_characters(self, line: str) -> list[str]:
        """The characters of a line that are in no piece."""
        ...

    def unknown_words(self, line: str) -> list[str]:
        """The words of a line that a vocabulary of words lacks."""
        ...


_SPELLINGS: dict[str, Spelling] = {
    "characters": CharacterSpelling(),
    "words": WordSpelling(),
    "bpe": SubwordSpelling(),
    "unigram": SubwordSpelling(),
}
_REMEMBERED_CHUNKS = 1 << 17


class VocabularySettings(BaseModel):
    """How to make a vocabulary: a section of an experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["characters", "words", "bpe", "unigram"] = "bpe"
    """What has an id: characters, words, or subwords by byte pair encoding or a unigram language model."""
    size: int = 8000
    """Most ids, the four special ones included."""
    lowercase: bool = False
    """Whether text is brought to lower case."""
    minimum_count: int = Field(default=1, ge=1)
    """Occurrences that a character or word needs to get an id, and for bpe a pair to be merged."""
    shared: bool = False
    """Whether both sides have one vocabulary, learned from both."""

    @field_validator("size")
    @classmethod
    def _has_room(cls, size: int) -> int:
        if size <= len(SPECIAL):
            raise ValueError(
                f"{size} leaves no room for text: {', '.join(SPECIAL)} take {len(SPECIAL)} ids, "
                f"so the size needs to be {len(SPECIAL) + 1} or more"
            )
        return size


class _VocabularyFile(BaseModel):
    """Contents of a vocabulary file; piece i has the id i + 4, after the special ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["regard vocabulary"] = "regard vocabulary"
    version: Literal[1] = 1
    settings: VocabularySettings
    pieces: list[str]
    merges: list[tuple[str, str]] | None = None
    scores: list[float] | None = None


class Vocabulary:
    """Ids for pieces of text: characters, words or subwords. Ids 0 to 3 are PAD, UNKNOWN, BEGIN and END.

    Text of known pieces comes back letter for letter, punctuation included, but for white space: spaces, tabs and line
    ends at the edges are dropped and inside become one space. No-break and ideographic spaces are text. The text is
    brought to NFC, and to lower case where the settings say so. A text that spells a special id, such as "</s>", gets
    the ids of its characters, never the special one.

    Made with `train` or `load`.

    >>> vocabulary = Vocabulary.train(["Hello, world!"], VocabularySettings(kind="words"))
    >>> ids = vocabulary.encode("Hello, hello world!")
    >>> ids
    [4, 7, 1, 5, 6]
    >>> vocabulary.decode(ids)
    'Hello, <unk> world!'
    """

    special = OWN_IDS

    def __init__(self, saved: _VocabularyFile):
        self.settings = saved.settings
        self._saved = saved
        self._pieces = [*SPECIAL, *saved.pieces]
        self._spelling = _SPELLINGS[saved.settings.kind]
        self._segment = _segmenter(saved)
        # A text repeats its words; remembering them makes encoding several times as fast.
        self._chunk_ids = functools.lru_cache(_REMEMBERED_CHUNKS)(self._encode_chunk)

    def __reduce__(self):
        return Vocabulary, (self._saved,)

    def __len__(self) -> int:
        return len(self._pieces)

    @classmethod
    def train(cls, lines: Iterable[str], settings: VocabularySettings) -> Vocabulary:
        """Learn a vocabulary; it does not depend on the order of the lines.

        Raises:
            VocabularyError: there is no text, or `settings.size` does not hold its characters (bpe, unigram).
        """
        if isinstance(lines, str):
            raise VocabularyError("lines is one str; it needs to be several: [line] for a text of one line")
        chunks = Counter[str]()
        spelling = _SPELLINGS[settings.kind]
        for line in lines:
            chunks.update(spelling.chunks(_normalise(line, settings)))
        counts = Counter[str]()
        for chunk, count in chunks.items():
            for piece in spelling.pieces(chunk):
                counts[piece] += count
        if not counts:
            raise VocabularyError("there is no text to learn a vocabulary from: no lines, or only empty ones")
        learned = _learn(counts, settings)
        saved = _VocabularyFile(settings=settings, pieces=learned.pieces, merges=learned.merges, scores=learned.scores)
        return cls(saved)

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without BEGIN and END; unknown pieces are UNKNOWN."""
        return list(itertools.chain.from_iterable(self.encode_words(line)))

    def encode_words(self, line: str) -> list[list[int]]:
        """The ids of each word of a line, a word being what white space separates."""
        return [self._chunk_ids(chunk) for chunk in self._spelling.chunks(self.normalised(line))]

    def normalised(self, line: str) -> str:
        """The line in NFC, in lower case if so configured: the form that is segmented into pieces."""
        return _normalise(line, self.settings)

    def language(self, line: str) -> str:
        """The empty string: a model has one target language."""
        return ""

    def unknown_characters(self, line: str) -> list[str]:
        """The characters of a line that are in no piece, each once, in their order; white space is always known."""
        text = self.normalised(line)
        if self._characters.issuperset(text):
            return []
        return [character for character in dict.fromkeys(text) if character not in self._characters]

    def unknown_words(self, line: str) -> list[str]:
        """The words of a line that a vocabulary of words lacks, each once, in their order; of other kinds none."""
        if self.settings.kind != "words":
            return []
        chunks = self._spelling.chunks(self.normalised(line))
        words = dict.fromkeys(word for chunk in chunks for word in self._spelling.pieces(chunk))
        return [word for word in words if self._segment([word]) == [UNKNOWN]]

    @property
    def has_subwords(self) -> bool:
        """Whether a piece may be a part of a word that is not a single character."""
        return self.settings.kind in ("bpe", "unigram")

    def is_special(self, i: int) -> bool:
        """Whether an id is no text: one of the first four."""
        return i < len(SPECIAL)

    def encode_batch(self, lines: Iterable[str]) -> list[list[int]]:
        """The ids of each line."""
        return [self.encode(line) for line in lines]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids to a line; PAD, BEGIN and END are dropped and UNKNOWN is "<unk>".

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        return self._spelling.line([self._piece(i) for i in ids if i not in (PAD, BEGIN, END)])

    def tokens(self, ids: Iterable[int]) -> list[str]:
        """The piece of each id for display: "▁" is a space; special ids are spelled out.

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        return [self._piece(i) if i < len(SPECIAL) else self._spelling.label(self._piece(i)) for i in ids]

    def words(self, ids: Sequence[int]) -> list[int]:
        """For each id, the number of its word; words are separated by white space and counted from 0.

        PAD, BEGIN and END belong to no word: -1.

        Raises:
            VocabularyError: an id is not one of this vocabulary.
        """
        is_text = [i not in (PAD, BEGIN, END) for i in ids]
        pieces = [self._piece(i) for i in itertools.compress(ids, is_text)]
        numbers = iter(itertools.accumulate(self._spelling.begins_word(pieces)))
        return [next(numbers) - 1 if text else -1 for text in is_text]

    def with_characters(self, characters: Iterable[str]) -> Vocabulary:
        """The vocabulary with characters that it lacks as pieces, their ids behind those that are there.

        Of a vocabulary of subwords each is two pieces, alone and at the beginning of a word. `settings.size` is that of
        the text that it was learned from.

        >>> vocabulary = Vocabulary.train(["ab b b"], VocabularySettings(kind="bpe", size=8))
        >>> grown = vocabulary.with_characters("①a")
        >>> len(vocabulary), len(grown), grown.tokens(grown.encode("b ①."))
        (8, 10, ['▁b', '▁①', '<unk>'])
        """
        new = [character for character in dict.fromkeys(characters) if character not in self._characters]
        if not self.has_subwords:
            return Vocabulary(self._saved.model_copy(update={"pieces": [*self._saved.pieces, *new]}))
        pieces = [piece for character in new for piece in (character, SPACE + character)]
        grown: dict[str, object] = {"pieces": [*self._saved.pieces, *pieces]}
        if self._saved.merges is not None:
            grown["merges"] = [*self._saved.merges, *((SPACE, character) for character in new)]
        if self._saved.scores is not None:
            grown["scores"] = [*self._saved.scores, *[min(self._saved.scores)] * len(pieces)]
        return Vocabulary(self._saved.model_copy(update=grown))

    def extended(self, source: str) -> Vocabulary:
        """The vocabulary with the words of one source that it lacks, their ids behind those that are there.

        A translator with a pointer copies them. Of subwords and characters it is the vocabulary itself.

        Source: See et al. 2017 (arXiv 1704.04368), section 2.2.

        >>> vocabulary = Vocabulary.train(["the cat sat"], VocabularySettings(kind="words"))
        >>> extended = vocabulary.extended("the lynx sat")
        >>> ids = extended.encode("a lynx sat")
        >>> ids, extended.decode(ids)
        ([1, 7, 5], '<unk> lynx sat')
        """
        lacking = self.unknown_words(source)
        if not lacking:
            return self
        ids = {word: i for i, word in enumerate(lacking, start=len(self))}
        known = self._segment
        grown = copy.copy(self)
        grown.__dict__.pop("_characters", None)
        grown._saved = self._saved.model_copy(update={"pieces": [*self._saved.pieces, *lacking]})
        grown._pieces = [*self._pieces, *lacking]
        grown._segment = lambda words: [ids.get(word, i) for word, i in zip(words, known(words), strict=True)]
        grown._chunk_ids = grown._encode_chunk
        return grown

    def save(self, path: str | Path) -> None:
        """Write the vocabulary as JSON, replacing the file atomically.

        Raises:
            CheckpointError: the file cannot be written.
        """
        text = json.dumps(self._saved.model_dump(exclude_none=True), ensure_ascii=False, indent=1)
        with atomic_write(path) as partial:
            partial.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read a vocabulary that `save` wrote.

        Raises:
            VocabularyError: there is no such file, or it is truncated or not a vocabulary.
        """
        try:
            saved = _VocabularyFile.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
            return cls(saved)
        except OSError as error:
            raise VocabularyError(f"cannot read the vocabulary {path}: {error.strerror or error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise VocabularyError(f"{path} is not a vocabulary of regard: {where}: {first['msg']}") from None
        except VocabularyError as error:
            raise VocabularyError(f"{path} is not a vocabulary of regard: {error}") from None
        except (ValueError, RecursionError) as error:
            raise VocabularyError(
                f"{path} is truncated or not a vocabulary of regard: it is not JSON in UTF-8 ({error})"
            ) from None

    @functools.cached_property
    def _characters(self) -> frozenset[str]:
        """Characters of all pieces, and white space."""
        return frozenset(spelled_with(self._saved.pieces))

    def _encode_chunk(self, chunk: str) -> list[int]:
        return self._segment(self._spelling.pieces(chunk))

    def _piece(self, i: int) -> str:
        if not 0 <= i < len(self._pieces):
            raise VocabularyError(f"{i} is not an id of this vocabulary; its ids are 0 to {len(self._pieces) - 1}")
        return self._pieces[i]


def _normalise(line: str, settings: VocabularySettings) -> str:
    return unicodedata.normalize("NFC", line.lower() if settings.lowercase else line)


def _learn(counts: Counter[str], settings: VocabularySettings) -> Subwords:
    room, minimum = settings.size - len(SPECIAL), settings.minimum_count
    if settings.kind == "bpe":
        return learn_bpe(counts, size=room, minimum_count=minimum)
    if settings.kind == "unigram":
        return learn_unigram(counts, size=room, minimum_count=minimum)
    frequent = sorted((-count, piece) for piece, count in counts.items() if count >= minimum)
    if not frequent:
        raise VocabularyError(f"no piece of the text is seen {minimum} times: lower minimum_count or give more text")
    return Subwords([piece for _, piece in frequent[:room]])


def _segmenter(saved: _VocabularyFile) -> Segmenter:
    """The function from pieces to ids.

    Raises:
        VocabularyError: the parts of `saved` contradict each other.
    """
    subwords = Subwords(saved.pieces, saved.merges, saved.scores)
    ids = {piece: i for i, piece in enumerate(saved.pieces, start=len(SPECIAL))}
    if len(ids) < len(saved.pieces):
        raise VocabularyError("a piece occurs twice")
    if saved.settings.kind == "bpe":
        unknown_parts = [part for merge in saved.merges or [] for part in (*merge, "".join(merge)) if part not in ids]
        if saved.merges is None or unknown_parts:
            raise VocabularyError("its merges are missing or name pieces that it does not have")
        return bpe_segmenter(subwords, special=SPECIAL, unknown=UNKNOWN)
    if saved.settings.kind == "unigram":
        if len(saved.scores or []) != len(saved.pieces):
            raise VocabularyError("it needs one score for each piece")
        return unigram_segmenter(subwords, special=SPECIAL, unknown=UNKNOWN)
    return lambda pieces: [ids.get(piece, UNKNOWN) for piece in pieces]
