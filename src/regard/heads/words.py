"""From weights between the pieces of a tokenizer to weights between words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from .looking import checked


def word_weights(weights: Tensor, words: Sequence[int | None], key_words: Sequence[int | None] | None = None) -> Tensor:
    """Weights between pieces (..., M, N) as weights between words (..., W, W'): sums over keys, means over queries.

    A row sums to 1 less what its pieces give to tokens of no word; a word without pieces has only zeros.

    Args:
        weights: between pieces, of any number of heads and layers.
        words: the number of each query's word, from 0; None or below 0 for tokens of no word, such as [CLS]. It is what
            `tokens.word_ids()` of a tokenizer of transformers gives.
        key_words: the same of the keys; without it those of the queries.

    Raises:
        ShapeError: not one number for each query and key.

    Source: Clark et al. 2019 (arXiv 1906.04341), section 4.1.

    >>> import torch
    >>> word_weights(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), [0, 0, None])
    tensor([[0.6250]])
    """
    key_words = words if key_words is None else key_words
    weights = checked(weights)
    if weights.shape[-2:] != (len(words), len(key_words)):
        raise ShapeError(
            f"weights have the shape {tuple(weights.shape)} for {len(words)} pieces of queries and {len(key_words)} of "
            "keys: each row and column needs the number of its word, or None"
        )
    rows, columns = (_members(numbers).to(weights) for numbers in (words, key_words))
    return (rows / rows.sum(-1, keepdim=True).clamp(min=1)) @ weights @ columns.mT


def _members(words: Sequence[int | None]) -> Tensor:
    """(words, pieces): 1 where a piece is of a word."""
    numbers = torch.tensor([-1 if word is None else word for word in words], dtype=torch.int64)
    return torch.arange(int(numbers.max().clamp(min=-1)) + 1 if len(words) else 0)[:, None] == numbers
