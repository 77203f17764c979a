"""The short list of a translator: the words that a sentence may become, and the output layer for these alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...backends.cpu.top_entries import top_entries
from ...errors import ConfigurationError
from ...nn.linear import linear
from .encoder_decoder import TiedOutput


@dataclass(frozen=True, eq=False)
class ListedWords:
    """The output layer of a batch of N sentences: of its K listed words, and which of them each sentence may become.

    words: their ids [K]. allowed: [N, K]. weight, bias: their rows of the output layer, [K, dim] and [K] or None.
    """

    words: Tensor
    allowed: Tensor
    weight: Tensor
    bias: Tensor | None

    def reorder(self, sentences: Tensor) -> ListedWords:
        """The words for these sentences, in this order; sentences may repeat."""
        return replace(self, allowed=self.allowed[sentences])

    def restrict(self, logits: Tensor) -> Tensor:
        """Logits [N, V] of all words, one row for each sentence, with -inf for those that it may not become."""
        kept = torch.full_like(logits, -torch.inf)
        kept[:, self.words] = logits[:, self.words].masked_fill(~self.allowed, -torch.inf)
        return kept

    def best_tokens(self, features: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` largest logits of each row, or all, largest first, their tokens, and the log-sum-exp [R, 1].

        features are [R, dim], as many rows for each sentence; words that a sentence may not become have logit -inf.
        """
        logits = linear(features, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        allowed = self.allowed.repeat_interleave(len(features) // len(self.allowed), dim=0)
        values, places, log_sums = top_entries(logits.masked_fill(~allowed, -torch.inf), min(count, len(self.words)))
        return values, self.words[places], log_sums


@dataclass(frozen=True, eq=False)
class ShortList:
    """Which words a sentence may become: those that are always listed, and those of each of its own words.

    Source word s has `words[starts[s] : starts[s + 1]]`. A search with it computes the logits of listed words alone, in
    less time; the others have no probability. Each sentence has its own words, whatever batch it is in; the first
    words of a vocabulary are commonly listed always.

    Args:
        always: ids of the target, among them that of the end of a sentence.
        starts: [source vocabulary + 1], from 0, increasing to the number of words.
        words: ids of the target.
        target_size: the size of its vocabulary.

    Raises:
        ConfigurationError: starts that are none; ids that the target does not have.

    Source: Jean et al. 2015 (arXiv 1412.2007), section 3.3: the most frequent words, and the likeliest of each source
    word. Marian lists words for a whole batch, and a few more to have a multiple of 8.

    >>> import torch
    >>> listed = ShortList(torch.tensor([0, 1]), torch.tensor([0, 0, 2, 3]), torch.tensor([4, 5, 4]), 6)
    >>> of_batch = listed.of(torch.tensor([[1, 0], [2, 1]]), torch.tensor([2, 1]), nn.Linear(3, 6))
    >>> of_batch.words, of_batch.allowed
    (tensor([0, 1, 4, 5]), tensor([[ True,  True,  True,  True],
            [ True,  True,  True, False]]))
    """

    always: Tensor
    starts: Tensor
    words: Tensor
    target_size: int

    def __post_init__(self) -> None:
        rises = bool((self.starts.diff() >= 0).all()) and len(self.starts) > 1
        if not rises or self.starts[0] != 0 or self.starts[-1] != len(self.words):
            raise ConfigurationError(
                f"the starts of a short list need to rise from 0 to its number of words, {len(self.words):,}"
            )
        for ids in (self.always, self.words):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.target_size:
                raise ConfigurationError(
                    f"a short list has ids {int(ids.min())} to {int(ids.max())}, and the target has "
                    f"{self.target_size:,} words"
                )

    def of(self, source: Tensor, lengths: Tensor, output: nn.Linear | TiedOutput) -> ListedWords:
        """The listed words of a batch [N, S] of sentences of these lengths [N], and the output layer for them.

        Tokens that the list does not know, as padding, list nothing.
        """
        allowed = torch.zeros(len(source), self.target_size, dtype=torch.bool)
        allowed[:, self.always] = True
        for row, length, sentence in zip(allowed, lengths.tolist(), source.tolist(), strict=True):
            for token in set(sentence[:length]):
                if token < len(self.starts) - 1:
                    row[self.words[self.starts[token] : self.starts[token + 1]]] = True
        words = allowed.any(0).nonzero()[:, 0]
        allowed, words = allowed[:, words].to(source.device), words.to(source.device)
        return ListedWords(words, allowed, output.weight[words], None if output.bias is None else output.bias[words])
