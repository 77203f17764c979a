"""What roles have to know of a text: which tokens are the same, which separate, which are rare, which are none."""

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
"""What tokenizers add to a piece to say that a word begins, goes on or ends."""


def is_delimiter(token: str) -> bool:
    """Whether a token separates: a separator such as [SEP], or nothing but punctuation.

    >>> [is_delimiter(token) for token in ("[SEP]", ",", "▁...", "Ġ", "no")]
    [True, True, True, False, False]
    """
    if token in SEPARATORS:
        return True
    bare = _bare(token)
    return bool(bare) and all(unicodedata.category(character).startswith("P") for character in bare)


def _bare(token: str) -> str:
    if token in SPECIAL:
        return ""
    for mark in MARKS:
        token = token.removeprefix(mark).removesuffix(mark)
    return token.strip()


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one sequence, or of each of a batch, as roles read them: (S, N), padded to one length.

    ids: equal tokens have equal numbers; padding has -1, and takes no part. delimiters: which separate. rarest: which
    are the rarest of their sequence, specials and delimiters aside; none where no counts were given.
    """

    ids: Tensor
    delimiters: Tensor
    rarest: Tensor

    @classmethod
    def of(
        cls,
        tokens: Sequence[str] | Sequence[int] | Sequence[Sequence[str]] | Sequence[Sequence[int]] | Tensor,
        *,
        counts: Mapping[str, int] | None = None,
    ) -> Tokens:
        """From the tokens of one sequence, or of several; those that are numbers are below 0 for padding.

        counts: how often each token occurs in some large text, for the rare-word role; a token that is not in it
        occurs 0 times. Tokens such as [PAD] are padding; shorter sequences are padded at their end.

        Raises:
            ConfigurationError: no tokens, or neither strings nor numbers.

        >>> Tokens.of(["[CLS]", "the", "cat", ",", "the"]).ids
        tensor([[0, 1, 2, 3, 1]])
        """
        given: list[Any] = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
        lists = given if given and isinstance(given[0], (list, tuple)) else [given]
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
    """Where the words are that occur least often."""
    words = [column for column, name in enumerate(names) if name and name not in SPECIAL and not is_delimiter(name)]
    if counts is None or not words:
        return []
    frequency = {column: counts.get(names[column] or "", 0) for column in words}
    least = min(frequency.values())
    return [column for column in words if frequency[column] == least]


def repeat_probe(
    vocabulary: int | Sequence[int], length: int, *, sequences: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    """Random tokens and the same once more, (sequences, 2 · length): what shows an induction head.

    Within the first half all tokens are different, so that each has occurred once when it comes again, and nothing but
    the repetition says what comes next. Put what the model expects before and after it, such as [CLS] and [SEP].

    Args:
        vocabulary: the token numbers to draw from, or how many there are, 0 to vocabulary - 1.
        length: of the part that is repeated.
        sequences: how many are drawn.
        generator: of torch, for the draw.

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
