"""Read a SentencePiece model, a .spm file: how text is normalised, and its pieces with their scores.

The file is a Protocol Buffers message, `ModelProto` of sentencepiece_model.proto, of which the fields that say how text
is cut are read here. What is read in part would cut text differently, so whatever is not known is refused.
"""

from __future__ import annotations

import functools
import heapq
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from regard.errors import VocabularyError
from regard.translation.tokenization import SPACE

# Numbers of fields, from sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _ADD_PREFIX, _REMOVE_SPACES, _ESCAPE_SPACES = 2, 3, 4, 5
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_MODEL_TYPES: dict[object, str] = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_REMEMBERED = 1 << 16
_SPACES = re.compile(" +")
_SURROGATES = re.compile("[\ud800-\udfff]")  # half a pair, which is no character


class SentencePieceModel:
    """Cuts text into the pieces of a SentencePiece model, of the unigram kind or of byte pair encoding.

    A text of several words is cut word by word, "▁" at the front of each; what no piece fits is an unknown piece, which
    is in the result as it is written. `names` are all pieces by their ids, also those that are no text.
    """

    def __init__(
        self,
        pieces: Mapping[str, float],
        rules: CharacterMap | None = None,
        *,
        kind: str = "unigram",
        names: Sequence[str] = (),
    ) -> None:
        self.names = tuple(names)
        self.characters = frozenset("".join(pieces))
        self.word_pieces = _CUTTERS[kind](pieces)
        self._normalised_word = functools.lru_cache(_REMEMBERED)(str if rules is None else rules.normalised)

    @classmethod
    def read(cls, path: Path) -> SentencePieceModel:
        """Read a .spm file.

        Raises:
            VocabularyError: the file cannot be read, is no SentencePiece model, or one whose way of cutting text is
                not read here: whole words, single characters, pieces for bytes, symbols of the user.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise VocabularyError(
                f"cannot read the SentencePiece model {path}, which cuts text for this translator: no such file; copy "
                "it from where the rest of the folder comes from"
            ) from None
        except OSError as error:
            raise VocabularyError(f"cannot read the SentencePiece model {path}: {error.strerror or error}") from None
        try:
            found = _parsed(data)
        except (ValueError, IndexError, struct.error) as error:
            raise VocabularyError(f"{path} is truncated or not a SentencePiece model ({error})") from None
        if found.unread:
            raise VocabularyError(f"{path} has {', '.join(found.unread)}, and a model like that is not read here")
        if not found.pieces:
            raise VocabularyError(f"{path} is not a SentencePiece model: it has no pieces")
        return cls(found.pieces, found.rules, kind=found.kind, names=found.names)

    def normalised(self, text: str) -> str:
        """The text in the form that is cut, its words separated by single spaces."""
        text = _SURROGATES.sub("\ufffd", text)
        text = " ".join(map(self._normalised_word, text.split(" ")))
        return _SPACES.sub(" ", text.replace(SPACE, " ")).strip(" ")

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text; what is unknown is in them as it is written."""
        return [piece for word in self.words(text) for piece in self.word_pieces(word)]

    def words(self, text: str) -> list[str]:
        """The words of a text in the form that is cut, "▁" at the front of each."""
        return [SPACE + word for word in self.normalised(text).split(" ") if word]


def _unigram_cutter(pieces: Mapping[str, float]) -> Callable[[str], list[str]]:
    """Cuts a word into the pieces with the greatest sum of scores."""
    # The unknown piece gets a noncharacter as its text, which no text holds.
    tokenizer = Tokenizer(Unigram([("\ufdd2", 0.0), *pieces.items()], unk_id=0, byte_fallback=False))

    def cut(word: str) -> list[str]:
        return [word[slice(*offsets)] for offsets in tokenizer.encode(word, add_special_tokens=False).offsets]

    return cut


def _merging_cutter(pieces: Mapping[str, float]) -> Callable[[str], list[str]]:
    """Merges two neighbours into the piece with the greatest score, the leftmost of equal ones, while there is one.

    What is unknown then is joined, as SentencePiece does it.
    """

    def cut(word: str) -> list[str]:
        parts: list[str | None] = list(word)
        before, after = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        merges: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right < len(parts):
                piece = f"{parts[left]}{parts[right]}"
                if piece in pieces:
                    heapq.heappush(merges, (-pieces[piece], left, right, piece))

        for left in range(len(word) - 1):
            propose(left, left + 1)
        while merges:
            _, left, right, piece = heapq.heappop(merges)
            if parts[left] is None or parts[right] is None or f"{parts[left]}{parts[right]}" != piece:
                continue  # one of them was merged with another neighbour
            parts[left], parts[right], after[left] = piece, None, after[right]
            if after[right] < len(parts):
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        left = [part for part in parts if part is not None]
        groups = groupby(left, key=pieces.__contains__)
        return [piece for known, run in groups for piece in (run if known else ["".join(run)])]

    return cut


_CUTTERS = {"unigram": _unigram_cutter, "bpe": _merging_cutter}


class CharacterMap:
    """The rules of a normaliser: of the keys that a text begins with, the longest is replaced, and so on behind it.

    `charsmap` is the size of a trie of the keys in UTF-8, the trie, and the replacements, each with a NUL behind it.
    The trie is a double array of 32-bit units, as the library Darts-clone makes it: the child of a node for a byte is
    at (node xor offset) xor byte, if the label there is that byte.
    """

    def __init__(self, charsmap: bytes) -> None:
        (size,) = struct.unpack_from("<I", charsmap)
        if size % 4 or 4 + size >= len(charsmap):
            raise ValueError("the rules of its normaliser are cut")
        self._units = struct.unpack_from(f"<{size // 4}I", charsmap, 4)
        self._replacements = charsmap[4 + size :]

    def normalised(self, text: str) -> str:
        """The text with every rule applied once, from left to right."""
        data, at, parts = text.encode(), 0, []
        while at < len(data):
            length, value = self._longest(data, at)
            if length:
                parts.append(self._replacements[value : self._replacements.index(b"\0", value)])
            else:
                length = 1 + sum(data[at] >= first for first in (0xC0, 0xE0, 0xF0))  # a character without a rule
                parts.append(data[at : at + length])
            at += length
        return b"".join(parts).decode("utf-8")

    def _longest(self, data: bytes, at: int) -> tuple[int, int]:
        """The bytes of the longest key that begins here, and the place of its replacement; 0 bytes if there is none."""
        units = self._units
        node, longest, value = _offset(units[0]), 0, 0
        for place in range(at, len(data)):
            node ^= data[place]
            if node >= len(units) or units[node] & 0x800000FF != data[place]:
                break
            has_value, node = units[node] >> 8 & 1, node ^ _offset(units[node])
            if has_value:
                longest, value = place + 1 - at, units[node] & 0x7FFFFFFF
        return longest, value


def _offset(unit: int) -> int:
    """The offset of a unit of the trie, whose bit 9 tells that it is counted in units of 256."""
    return unit >> 10 << ((unit & 1 << 9) >> 6)


@dataclass(frozen=True)
class _Contents:
    """The pieces with their scores, what kind they are, the rules of the normaliser, and what is not read."""

    pieces: dict[str, float]
    names: tuple[str, ...]
    kind: str
    rules: CharacterMap | None
    unread: tuple[str, ...]


def _parsed(data: bytes) -> _Contents:
    pieces, texts = dict[str, float](), list[str]()
    rules, unread, kinds, method = None, [], set(), "unigram"
    for field, value in _fields(data):
        if field == _PIECES:
            piece = dict(_fields(_message(value)))
            kind = piece.get(_KIND, _NORMAL)
            kinds.add(kind)
            texts.append(_message(piece[_TEXT]).decode("utf-8"))
            if kind == _NORMAL:
                pieces[texts[-1]] = struct.unpack("<f", _message(piece.get(_SCORE, bytes(4))))[0]
        elif field == _TRAINER:
            trainer = dict(_fields(_message(value)))
            method = _MODEL_TYPES.get(trainer.get(_MODEL_TYPE, 1), "unknown")
            if method not in _CUTTERS:
                unread.append(f"pieces of the kind {method!r} where {' and '.join(_CUTTERS)} are read")
            if trainer.get(_BYTE_FALLBACK):
                unread.append("pieces for the bytes of unknown characters")
            if trainer.get(_WHITESPACE_AS_SUFFIX):
                unread.append("spaces at the end of words")
        elif field == _NORMALIZER:
            normalizer = dict(_fields(_message(value)))
            charsmap = _message(normalizer.get(_CHARSMAP, b""))
            rules = CharacterMap(charsmap) if charsmap else None
            names = {_ADD_PREFIX: "prefix", _REMOVE_SPACES: "removal of extra spaces", _ESCAPE_SPACES: "mark of spaces"}
            unread += [f"no {name}" for number, name in names.items() if not normalizer.get(number, 1)]
    if _USER_DEFINED in kinds:
        unread.append("symbols that its user defined")
    if any(SPACE in piece[1:] for piece in pieces):
        unread.append("pieces of several words")
    if beyond := kinds - {_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, 6}:
        unread.append(f"pieces of an unknown kind, {min(beyond)}")
    if method == "bpe" and _UNUSED in kinds:
        unread.append("pieces that are made only to be cut again")
    return _Contents(pieces, tuple(texts), method, rules, tuple(unread))


def _message(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type than that of its number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """The fields of a message by number: whole numbers, and bytes, which also hold the floats."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if (kind := key & 7) == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of the type {kind}")
        size, at = (8, at) if kind == 1 else (4, at) if kind == 5 else _varint(data, at)
        if at + size > len(data):
            raise ValueError("a field is longer than the file")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")
