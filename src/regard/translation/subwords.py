"""Subwords learned from text, by byte pair encoding or as a unigram language model, with the `tokenizers` library.

Only the library's trainers and models are used, not its pipeline around them: special spellings in a text therefore
have no power, and encoding needs no threads of the library, so that a process may fork between training and encoding.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import CharDelimiterSplit
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from regard.errors import VocabularyError

Segmenter = Callable[[Sequence[str]], list[int]]
"""From pieces of text to the ids of their subwords."""

_SEPARATOR = "\ufdd2"  # a noncharacter: spellings keep it out of the text
_LONGEST_SUBWORD = 16
_REPEATS_PER_LINE = 1000


@dataclass(frozen=True)
class Subwords:
    """What was learned: the subwords in the order of their ids, and the rule by which they cut a piece of text."""

    pieces: list[str]
    merges: list[tuple[str, str]] | None = None
    """Byte pair encoding: which two subwords become one, in order."""
    scores: list[float] | None = None
    """Unigram: the logarithm of each subword's probability."""


def learn_bpe(counts: Counter[str], *, size: int, minimum_count: int) -> Subwords:
    """Byte pair encoding: the most frequent pair of neighbours becomes one subword, until there are `size`.

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
    """A unigram language model over subwords: those that explain the text least are taken out until `size` are left.

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
    """Cut pieces by the merges; ids count from the special ones."""
    vocab = {piece: i for i, piece in enumerate([*special, *subwords.pieces])}
    return _segmenter(BPE(vocab=vocab, merges=subwords.merges, unk_token=special[unknown]))


def unigram_segmenter(subwords: Subwords, *, special: Sequence[str], unknown: int) -> Segmenter:
    """Cut pieces into the likeliest subwords; ids count from the special ones."""
    scored = zip(subwords.pieces, subwords.scores or [], strict=True)
    vocab = [*((name, 0.0) for name in special), *scored]
    return _segmenter(Unigram(vocab=vocab, unk_id=unknown, byte_fallback=False))


def _segmenter(model: BPE | Unigram) -> Segmenter:
    return lambda pieces: [token.id for piece in pieces for token in model.tokenize(piece)]


def _learn(
    model: BPE | Unigram, trainer: BpeTrainer | UnigramTrainer, counts: Counter[str], *, size: int, minimum_count: int
) -> dict:
    """Train, and give the model as plain data."""
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
    """The pieces as often as they were seen, in an order that depends on nothing else; rare characters cut them."""
    cuts = str.maketrans(dict.fromkeys(rare, _SEPARATOR))
    for piece in sorted(counts):
        kept = piece.translate(cuts)
        for start in range(0, counts[piece], _REPEATS_PER_LINE):
            yield _SEPARATOR.join([kept] * min(_REPEATS_PER_LINE, counts[piece] - start))


def _settle_scores(scores: dict[str, float]) -> dict[str, float]:
    """The scores without what differs from one training to the next, best first.

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
    """Have the library train in one thread where it can; older ones warn at every fork after they used several."""
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
