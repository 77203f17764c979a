"""Tokens and words of an atlas: matching token lists to maps, and their storage as UTF-8 arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import AtlasError, nearest


@dataclass(frozen=True)
class TokenizedText:
    """Tokens with the word that each belongs to; `Recording.atlas` takes it in place of a list of tokens.

    tokens: one for each position. words: the number of each token's word, from 0; None or below 0 for tokens of no
    word, such as [CLS]. It is what `word_ids()` of a tokenizer of transformers and `Vocabulary.words` give.

    Raises:
        AtlasError: tokens that are no words; not one whole number for each token.

    >>> TokenizedText(["[CLS]", "un", "##seen", "cat"], [None, 0, 0, 1]).words
    (-1, 0, 0, 1)
    """

    tokens: Sequence[str]
    words: Sequence[int | None] | None = None

    def __post_init__(self) -> None:
        if not _are_words(self.tokens):
            raise AtlasError(
                f"the tokens of TokenizedText need to be a list of str; they are {str(self.tokens)[:80]!r}"
            )
        object.__setattr__(self, "tokens", tuple(self.tokens))
        if self.words is None:
            return
        numbers = [-1 if number is None else number for number in self.words]
        if len(numbers) != len(self.tokens) or not all(map(_is_number, numbers)):
            raise AtlasError(
                f"TokenizedText has {len(self.tokens)} tokens, and the words {str(list(self.words))[:80]}; it needs "
                "the number of a word for each token, or None"
            )
        object.__setattr__(self, "words", tuple(max(int(number), -1) for number in numbers))

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, indices: Sequence[int | None]) -> TokenizedText:
        """The tokens at some indices; an empty token of no word for None."""
        tokens = ["" if index is None else self.tokens[index] for index in indices]
        if self.words is None:
            return TokenizedText(tokens)
        return TokenizedText(tokens, [None if index is None else self.words[index] for index in indices])


TokenLists = list[TokenizedText]  # the words of each sequence


def _are_words(words: Any) -> bool:
    return isinstance(words, Sequence) and not isinstance(words, str) and all(isinstance(word, str) for word in words)


def _is_number(number: Any) -> bool:
    return hasattr(number, "__index__") and not isinstance(number, bool) and int(number) < 2**31


@dataclass(frozen=True, slots=True)
class CallShape:
    """Name, kind, sizes and positions (B or 1, M), (B or 1, N) of a call, which its tokens have to match.

    guessed: whether nothing but its sizes said that it is of the kind "self". looks_back: whether no row attends to
    a later key, as where a text is generated.
    """

    name: str
    kind: str
    sequences: int
    queries: int
    keys: int
    steps: int
    positions: tuple[Tensor, Tensor]
    guessed: bool = False
    is_causal: bool = False


class TokenTable:
    """Token lists of an atlas, each stored once, as UTF-8 bytes with offsets."""

    def __init__(self) -> None:
        self._numbers: dict[TokenizedText, int] = {}

    def add(self, lists: TokenLists | None) -> list[int] | None:
        """Store token lists, and return their numbers."""
        return None if lists is None else [self._numbers.setdefault(words, len(self._numbers)) for words in lists]

    def arrays(self) -> dict[str, Tensor]:
        """The arrays of all stored lists by name."""
        held = {}
        for pieces, number in self._numbers.items():
            parts = [word.encode("utf-8", "replace") for word in pieces.tokens]
            ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            if pieces.words is not None:
                held[f"words.{number}.numbers"] = torch.tensor(pieces.words, dtype=torch.int32)
            held[f"words.{number}"] = torch.from_numpy(np.frombuffer(b"".join(parts), dtype=np.uint8).copy())
            held[f"words.{number}.ends"] = torch.from_numpy(ends)
        return held


def read_words(held: Tensor, ends: Tensor) -> tuple[str, ...]:
    """Decode stored tokens; invalid UTF-8 becomes replacement characters."""
    data = held.numpy().tobytes()
    return tuple(data[start:stop].decode("utf-8", "replace") for start, stop in pairwise(ends.tolist()))


def match_tokens(call: CallShape, tokens: Any) -> tuple[str, dict[str, TokenLists | None]]:
    """Kind of a call, and tokens of its queries and keys by sequence; None where no tokens were passed.

    A pair of different words, one for each query and each key, says "cross" where "self" was guessed.

    Raises:
        AtlasError: they are not words, or not as many as there are positions.
    """
    is_named = isinstance(tokens, Mapping) and call.name in tokens
    tokens = _chosen(call.name, tokens)
    if tokens is None:
        return call.kind, {"query": None, "key": None}
    is_pair = isinstance(tokens, tuple) and len(tokens) == 2 and not any(isinstance(side, str) for side in tokens)
    of_queries, of_keys = (_lists(call, side) for side in (tokens if is_pair else (tokens, tokens)))
    if call.kind == "cross":
        return "cross", {
            "query": _fitted(call, "query", of_queries, call.queries),
            "key": _fitted(call, "key", of_keys, call.keys),
        }
    told = call.guessed or (is_named and call.queries == call.keys)
    if is_pair and (told or call.queries != call.keys) and _are_pair(call, of_queries, of_keys):
        return "cross" if told else "self", {"query": of_queries, "key": of_keys}
    fits = [all(_fits(call, "key", words, call.keys) for words in lists) for lists in (of_queries, of_keys)]
    side = of_keys if fits[1] and (not fits[0] or "encoder" in call.name) else of_queries
    of_keys = _fitted(call, "key", side, call.keys)
    return "self", {"query": [_of_queries(call, words, number) for number, words in enumerate(of_keys)], "key": of_keys}


def _are_pair(call: CallShape, of_queries: TokenLists, of_keys: TokenLists) -> bool:
    """Whether the lists fit queries and keys, and differ."""
    return (
        all(len(words) == call.queries for words in of_queries)
        and all(len(words) == call.keys for words in of_keys)
        and of_queries != of_keys
    )


def _chosen(name: str, tokens: Any) -> Any:
    """The entry of a mapping for a module: under its name, or the longest prefix of it."""
    if not isinstance(tokens, Mapping):
        return tokens
    fitting = [key for key in tokens if name == key or name.startswith(f"{key}.") or not key]
    if not fitting:
        raise AtlasError(
            f"tokens has no word list for {name!r}; {nearest(name, tokens)}. Give it one, under its name or the "
            "beginning of it, or None"
        )
    return tokens[max(fitting, key=len)]


def _lists(call: CallShape, tokens: Any) -> TokenLists:
    """Token lists by sequence, from one list for all or one for each."""
    if _are_list(tokens):
        return [_pieces(tokens)] * call.sequences
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not all(map(_are_list, tokens)):
        raise AtlasError(
            f"tokens needs lists of words, str, for {call.name!r}; it has {str(tokens)[:80]!r}: give a list or "
            "TokenizedText, one of these for each sequence, or a pair of these for cross-attention"
        )
    if len(tokens) != call.sequences:
        raise AtlasError(
            f"tokens has {len(tokens)} lists, but {call.name!r} has {call.sequences} sequences: give one list for "
            "each, or one list for all"
        )
    return [_pieces(words) for words in tokens]


def _are_list(tokens: Any) -> bool:
    return isinstance(tokens, TokenizedText) or _are_words(tokens)


def _pieces(tokens: Any) -> TokenizedText:
    return tokens if isinstance(tokens, TokenizedText) else TokenizedText(tokens)


def _fits(call: CallShape, side: str, words: TokenizedText, count: int) -> bool:
    """Whether there is a token for each position; a generated text may have one more, which was never a query.

    One step is enough for that: rows that look back, or a single row over a source, may be the last of a text.
    """
    grows = call.steps > 1 or (call.is_causal if call.kind == "self" else side == "query" and count == 1)
    return len(words) == count or (grows and len(words) == count + 1)


def _fitted(call: CallShape, side: str, lists: TokenLists, count: int) -> TokenLists:
    wrong = next((words for words in lists if not _fits(call, side, words, count)), None)
    if wrong is not None:
        where = "keys" if side == "key" else "queries"
        raise AtlasError(
            f"tokens has {len(wrong)} words, but {call.name!r} has {count} {where}: give one for each position, "
            "padding included; of cross-attention those of the queries and of the keys as a pair, and words for "
            "some modules by a mapping from their names"
        )
    return [words if len(words) == count else words.select(range(count)) for words in lists]


def _of_queries(call: CallShape, words: TokenizedText, sequence: int) -> TokenizedText:
    """Query tokens of self-attention: those of the keys at the same positions."""
    if call.queries == call.keys:
        return words
    queries, keys = (of[sequence % len(of)].tolist() for of in call.positions)
    at = {position: index for index, position in enumerate(keys)}
    return words.select([at.get(position) for position in queries])
