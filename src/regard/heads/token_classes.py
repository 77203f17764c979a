"""Classes of tokens for roles: equal tokens, delimiters, rarest words, padding; and the repeat probe."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..utils.numbers import whole_number

PADDING = frozenset({"[PAD]", "<pad>", "<|pad|>", "<|padding|>"})
SEPARATORS = frozenset({"[SEP]", "</s>", "<sep>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eot>"})
BEGINNINGS = frozenset({"[CLS]", "<s>", "<bos>", "<cls>", "<|begin_of_text|>", "<|startoftext|>", "<|im_start|>"})
SPECIAL = PADDING | SEPARATORS | BEGINNINGS | {"[MASK]", "<mask>", "[UNK]", "<unk>"}
MARKS = ("##", "▁", "Ġ", "Ċ", "@@", "</w>")
"""Marks of tokenizers for the beginning, continuation or end of a word."""


def is_delimiter(token: str) -> bool:
    """Whether a token is a separator such as [SEP], or only punctuation.

    >>> [is_delimiter(token) for token in ("[SEP]", ",", "▁...", "Ġ", "no")]
    [True, True, True, False, False]
    """
    if token in SEPARATORS:
        return True
    text = _without_marks(token)
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def _without_marks(token: str) -> str:
    if token in SPECIAL:
        return ""
    for mark in MARKS:
        token = token.removeprefix(mark).removesuffix(mark)
    return token.strip()


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one sequence, or of each sequence of a batch, as tensors (S, N), padded to one length.

    ids: equal tokens have equal numbers, padding has -1. delimiters: bool. rarest: bool, the rarest words of their
    sequence, without special tokens and delimiters; all False without counts.
    """

    ids: Tensor
    delimiters: Tensor
    rarest: Tensor

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[str] | Sequence[int] | Sequence[Sequence[str]] | Sequence[Sequence[int]] | Tensor,
        *,
        counts: Mapping[str, int] | None = None,
    ) -> Tokens:
        """From strings or token numbers, of one sequence or of several.

        Tokens such as [PAD] and numbers below 0 are padding; shorter sequences are padded at their end. counts: how
        often each token occurs in some large text, for the rare-word role; a missing token counts as 0 times.

        Raises:
            ConfigurationError: no tokens, or neither strings nor numbers.

        >>> Tokens.from_lists(["[CLS]", "the", "cat", ",", "the"]).ids
        tensor([[0, 1, 2, 3, 1]])
        """
        items: list[Any] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        lists = items if items and isinstance(items[0], (list, tuple)) else [items]
        flat = [token for one in lists for token in one]
        if not flat or not all(isinstance(token, (str, int)) and not isinstance(token, bool) for token in flat):
            raise ConfigurationError(
                f"tokens need to be strings or whole numbers, as many as there are keys, in one list or one list for "
                f"each sequence; they are {tokens!r:.80}"
            )
        numbers: dict[str, int] = {}
        longest = max(map(len, lists))
        ids = torch.full((len(lists), longest), -1)
        delimiters, rarest = torch.zeros(2, len(lists), longest, dtype=torch.bool)
        for row, one in enumerate(lists):
            names = [_name(token) for token in one]
            for column, name in enumerate(names):
                if name is not None:
                    ids[row, column] = numbers.setdefault(name, len(numbers))
                    delimiters[row, column] = is_delimiter(name)
            for column in _rarest(names, counts):
                rarest[row, column] = True
        return cls(ids, delimiters, rarest)


def _name(token: str | int) -> str | None:
    """The token as a string, or None for padding."""
    if isinstance(token, int):
        return None if token < 0 else str(token)
    return None if token in PADDING else token


def _rarest(names: Sequence[str | None], counts: Mapping[str, int] | None) -> list[int]:
    """The columns of the words with the least count."""
    words = [column for column, name in enumerate(names) if name and name not in SPECIAL and not is_delimiter(name)]
    if counts is None or not words:
        return []
    frequency = {column: counts.get(names[column] or "", 0) for column in words}
    least = min(frequency.values())
    return [column for column in words if frequency[column] == least]


def repeat_probe(
    vocabulary: int | Sequence[int], length: int, *, sequences: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Random tokens followed by the same tokens, (sequences, 2 · length), to test for induction heads.

    The tokens of a half are distinct, so that in the second half only the repetition predicts the next token. Add the
    special tokens that the model expects before and after, such as [CLS] and [SEP].

    Args:
        vocabulary: the token numbers to draw from, or how many there are, 0 to vocabulary - 1.
        length: tokens in a half.
        sequences: the number of sequences.
        generator: torch's, for the draw.

    Raises:
        ConfigurationError: fewer tokens than `length`, or numbers that are not whole.

    Source: Olsson et al. 2022, In-context Learning and Induction Heads, section "Per-head evaluations" (prefix
    matching on random tokens that are repeated).

    >>> probe = repeat_probe(100, 5, generator=torch.Generator().manual_seed(0))
    >>> probe.shape, bool((probe[:, :5] == probe[:, 5:]).all())
    (torch.Size([1, 10]), True)
    """
    choices = range(vocabulary) if isinstance(vocabulary, int) else vocabulary
    length, sequences = whole_number("length", length), whole_number("sequences", sequences)
    if len(choices) < length:
        raise ConfigurationError(
            f"length is {length} and there are {len(choices)} tokens to draw from; all of the first half differ, so "
            "there need to be at least as many"
        )
    numbers = torch.tensor(list(choices))
    blocks = torch.stack(
        [numbers[torch.randperm(len(numbers), generator=generator)[:length]] for _ in range(sequences)]
    )
    return blocks.repeat(1, 2)
