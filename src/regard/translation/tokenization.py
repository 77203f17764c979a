"""Tokenisation of lines into characters, words or subwords, and its exact inverse.

Each spelling marks what cutting a line would lose. Where white space marks a word's beginning, "▁" stands at the front
of the word ("▁Hello" "," "▁world"). Where words are whole, "￭" stands on punctuation at the side where it touches its
neighbour ("Hello" "￭," "world"), so that a word is the same piece wherever it occurs.

Subwords are learned by byte pair encoding or as a unigram language model, with the `tokenizers` library. Only its
trainers and models are used, not its pipeline: special tokens spelled in a text have no effect, and encoding needs no
threads of the library, so that a process may fork between training and encoding.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import CharDelimiterSplit
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from regard.errors import VocabularyError

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
    """Protocol of reversible pre-tokenisation: a line is split at spaces into marked chunks, and chunks into pieces."""

    def chunks(self, line: str) -> list[str]:
        """Split a line at white space: spaces, tabs and line ends; a no-break space counts as text."""
        ...

    def pieces(self, chunk: str) -> list[str]:
        """Split a chunk into pieces; a subword model may split pieces further, but never joins them."""
        ...

    def line(self, pieces: Sequence[str]) -> str:
        """Join pieces to the line that they encode."""
        ...

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """Whether each piece follows white space or the start of the line."""
        ...

    def label(self, piece: str) -> str:
        """The piece as displayed to users."""
        ...


class MarkedSpelling:
    """Base class of the spellings that write a space as "▁" in a piece."""

    def line(self, pieces: Sequence[str]) -> str:
        """Concatenate the pieces, with each "▁" as a space."""
        return "".join(pieces).removeprefix(SPACE).translate(_UNESCAPES)

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """True for pieces that begin with "▁", a lone "▁" too, and for the first piece."""
        return [i == 0 or piece.startswith(SPACE) for i, piece in enumerate(pieces)]

    def label(self, piece: str) -> str:
        """The piece, "▁" included."""
        return piece.translate(_READABLE)


class CharacterSpelling(MarkedSpelling):
    """Pre-tokenisation into characters: every character is a piece, and a space is the piece "▁".

    >>> spelling = CharacterSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks("ab c")]
    [['a', 'b'], ['▁', 'c']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line, all but the first with "▁" before them."""
        first, *rest = words_of(line) or [""]
        return [first, *(SPACE + word for word in rest)]

    def pieces(self, chunk: str) -> list[str]:
        """The characters of the chunk."""
        return list(chunk)


class SubwordSpelling(MarkedSpelling):
    """Pre-tokenisation for subword models: words with "▁" before them; punctuation marks are separate pieces.

    >>> spelling = SubwordSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks("Hello, world!")]
    [['▁Hello', ','], ['▁world', '!']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line, each with "▁" before it."""
        return [SPACE + word for word in words_of(line)]

    def pieces(self, chunk: str) -> list[str]:
        """Runs of letters, and single punctuation marks; the first piece begins with "▁"."""
        first, *rest = _cut_off_punctuation(chunk.removeprefix(SPACE))
        return [SPACE + first, *rest]


class WordSpelling:
    """Pre-tokenisation into words; punctuation marks are separate pieces, with "￭" on sides that have no space.

    >>> spelling = WordSpelling()
    >>> [spelling.pieces(chunk) for chunk in spelling.chunks('Hello, ("world")!')]
    [['Hello', '￭,'], ['(￭', '"￭', 'world', '￭"', '￭)', '￭!']]
    """

    def chunks(self, line: str) -> list[str]:
        """The words of the line with adjacent punctuation."""
        return words_of(line)

    def pieces(self, chunk: str) -> list[str]:
        """Runs of letters, and single punctuation marks with joiners "￭".

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
        """Join the pieces with spaces, except where a joiner "￭" attaches them."""
        parts = []
        for piece, begins in zip(pieces, self.begins_word(pieces), strict=True):
            parts.append((SPACE if begins and parts else "") + piece.replace(JOINER, ""))
        return "".join(parts).translate(_UNESCAPES)

    def begins_word(self, pieces: Sequence[str]) -> list[bool]:
        """True where neither this piece nor the previous one has a joiner between them, and for the first piece."""
        borders = itertools.pairwise(pieces)
        touches = [left.endswith(JOINER) or right.startswith(JOINER) for left, right in borders]
        return [not touching for touching in [False, *touches][: len(pieces)]]

    def label(self, piece: str) -> str:
        """The word or punctuation mark without joiners."""
        return piece.replace(JOINER, "").translate(_READABLE)


def spelled_with(pieces: Iterable[str]) -> set[str]:
    """Characters of the text that a set of pieces can encode, in any spelling, and white space.

    >>> sorted(spelled_with(["▁ab", "￭,"]))[-3:]
    [',', 'a', 'b']
    """
    characters = set().union(*pieces) - {SPACE, JOINER}
    return {character.translate(_READABLE) for character in characters}.union(WHITE_SPACE)


def words_of(line: str) -> list[str]:
    """The words of a line: what white space separates; a no-break space counts as text."""
    if _NEEDS_ESCAPE.search(line):  # rare, and several times as fast to find out as to translate in vain
        line = line.translate(_ESCAPES)
    return [word for word in line.split(" ") if word]


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


Segmenter = Callable[[Sequence[str]], list[int]]
"""From pieces of text to the ids of their subwords."""

_SEPARATOR = "\ufdd2"  # a noncharacter: spellings keep it out of the text
_LONGEST_SUBWORD = 16
_REPEATS_PER_LINE = 1000


@dataclass(frozen=True)
class Subwords:
    """A trained subword model: subwords in the order of their ids, and the merges or scores that segment text."""

    pieces: list[str]
    merges: list[tuple[str, str]] | None = None
    """Byte pair encoding: which two subwords become one, in order."""
    scores: list[float] | None = None
    """Unigram: the logarithm of each subword's probability."""


def learn_bpe(counts: Counter[str], *, size: int, minimum_count: int) -> Subwords:
    """Learn byte pair encoding: merge the most frequent pair of neighbours repeatedly until there are `size` subwords.

    Characters and pairs seen fewer than `minimum_count` times are left out.

    Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with Subword Units", ACL 2016.

    Raises:
        VocabularyError: `size` does not even hold the characters.

    >>> learn_bpe(Counter({"▁low": 5, "▁lower": 2}), size=8, minimum_count=1).merges
    [('l', 'o'), ('▁', 'lo')]
    """
    trainer = BpeTrainer(
        vocab_size=size,
        min_frequency=minimum_count,
        max_token_length=_LONGEST_SUBWORD,
        show_progress=False,
    )
    model = _learn(BPE(), trainer, counts, size=size, minimum_count=minimum_count)
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return Subwords(pieces, merges=[(left, right) for left, right in model["merges"]])


def learn_unigram(counts: Counter[str], *, size: int, minimum_count: int) -> Subwords:
    """Learn a unigram language model over subwords: the least useful ones are pruned until `size` are left.

    Characters seen fewer than `minimum_count` times are left out.

    Source: Kudo, "Subword Regularization", ACL 2018.

    Raises:
        VocabularyError: `size` does not even hold the characters.
    """
    # The trainer counts an unknown subword of its own, and never ends if the characters with it are more than the size.
    trainer = UnigramTrainer(vocab_size=size + 1, max_piece_length=_LONGEST_SUBWORD, show_progress=False)
    model = _learn(Unigram(), trainer, counts, size=size, minimum_count=minimum_count)
    scores = _settle_scores({piece: 0.0 if score is None else score for piece, score in model["vocab"]})
    longer = [piece for piece in scores if len(piece) > 1]
    for piece in longer[size - len(scores) + len(longer) :]:
        del scores[piece]
    return Subwords(list(scores), scores=list(scores.values()))


def bpe_segmenter(subwords: Subwords, *, special: Sequence[str], unknown: int) -> Segmenter:
    """Segmenter by BPE merges; ids of subwords follow those of the special tokens."""
    vocab = {piece: i for i, piece in enumerate([*special, *subwords.pieces])}
    return _segmenter(BPE(vocab=vocab, merges=subwords.merges, unk_token=special[unknown]))


def unigram_segmenter(subwords: Subwords, *, special: Sequence[str], unknown: int) -> Segmenter:
    """Segmenter into the most likely subwords; ids of subwords follow those of the special tokens."""
    scored = zip(subwords.pieces, subwords.scores or [], strict=True)
    vocab = [*((name, 0.0) for name in special), *scored]
    return _segmenter(Unigram(vocab=vocab, unk_id=unknown, byte_fallback=False))


def _segmenter(model: BPE | Unigram) -> Segmenter:
    return lambda pieces: [token.id for piece in pieces for token in model.tokenize(piece)]


def _learn(
    model: BPE | Unigram, trainer: BpeTrainer | UnigramTrainer, counts: Counter[str], *, size: int, minimum_count: int
) -> dict:
    """Train a model of the tokenizers library, and return it as parsed JSON."""
    characters = Counter[str]()
    for piece, count in counts.items():
        for character in piece:
            characters[character] += count
    rare = {character for character, count in characters.items() if count < minimum_count}
    _require_room(characters.keys() - rare, size)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = CharDelimiterSplit(_SEPARATOR)
    with _one_thread():
        tokenizer.train_from_iterator(_training_lines(counts, rare), trainer=trainer)
    return json.loads(tokenizer.to_str())["model"]


def _require_room(alphabet: set[str], size: int) -> None:
    if not alphabet:
        raise VocabularyError("no character of the text is seen often enough: lower minimum_count or give more text")
    if len(alphabet) > size:
        raise VocabularyError(
            f"the text has {len(alphabet):,} different characters, and each needs a subword of its own, but the size "
            f"leaves room for {size:,}: raise the size by {len(alphabet) - size:,} or more, or raise minimum_count"
        )


def _training_lines(counts: Counter[str], rare: set[str]) -> Iterator[str]:
    """Each piece repeated by its count, in alphabetical order, split at rare characters."""
    cuts = str.maketrans(dict.fromkeys(rare, _SEPARATOR))
    for piece in sorted(counts):
        kept = piece.translate(cuts)
        for start in range(0, counts[piece], _REPEATS_PER_LINE):
            yield _SEPARATOR.join([kept] * min(_REPEATS_PER_LINE, counts[piece] - start))


def _settle_scores(scores: dict[str, float]) -> dict[str, float]:
    """Scores rounded so that repeated trainings return the same ones, best first.

    The trainer adds in an order that changes, which moves the last digits, and it hands the characters that its model
    dropped the lowest score plus 0.0001, 0.0002 and so on in such an order. They all get the lowest score here.
    """
    lowest = min(scores.values())
    ceiling = lowest + 1e-4 * len(scores)
    settled = {
        piece: round(lowest if len(piece) == 1 and score <= ceiling else score, 6) for piece, score in scores.items()
    }
    return dict(sorted(settled.items(), key=lambda item: (-item[1], item[0])))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Make the tokenizers library train in one thread; older versions warn at every fork after using several."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
