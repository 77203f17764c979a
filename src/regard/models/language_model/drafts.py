"""Drafts of the next tokens, which a model checks in one step: by looking them up in the text, or by a small model.

A draft changes no token: it is accepted as far as the model would have chosen the same, drawn by the same generator.

Source: Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192), section 2. A draft is one sequence of tokens here: their rule then accepts the token that is drawn too.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...errors import ConfigurationError, PagesExhausted
from ...nn.caches import PagedSequence
from ...nn.caches.paged_memory import PAGE
from ...utils.numbers import whole_number
from .paged_model import PagedModel

if TYPE_CHECKING:
    from .language_model import LanguageModel

READ_AT_ONCE = 1024
"""Tokens that a draft model reads for one draft; a text that has more without a draft waits for the next step."""


class Draft(Protocol):
    """What proposes the next tokens of texts, each of which has a number."""

    def propose(self, texts: Mapping[int, Sequence[int]], count: int) -> dict[int, list[int]]:
        """At most `count` tokens that may follow each text; none for a text of which nothing is known."""
        ...

    def forget(self, number: int) -> None:
        """A text has ended: nothing need be kept for it."""
        ...


def check_draft(draft: object) -> None:
    """Check that a value is a draft, or None.

    Raises:
        ConfigurationError: it is neither.
    """
    if draft is not None and (isinstance(draft, type) or not hasattr(draft, "propose")):
        raise ConfigurationError(
            f"draft is {draft!r}; it needs a PromptLookup(), a DraftModel(model), or None for none"
        )


@dataclass(frozen=True)
class PromptLookup:
    """The tokens that followed the last tokens of a text where these stood before, the latest place first.

    For texts that repeat what they were given, as summaries, translations of code and corrections do.

    longest, shortest: how many of the last tokens have to stand there: as many as there are up to `longest`.

    Raises:
        ConfigurationError: numbers that are no integers of at least 1, or `shortest` above `longest`.

    Source: Saxena 2023, "Prompt Lookup Decoding".

    >>> PromptLookup().propose({1: [5, 6, 7, 8, 9, 1, 5, 6, 7]}, 3)
    {1: [8, 9, 1]}
    """

    longest: int = 3
    shortest: int = 2

    def __post_init__(self) -> None:
        if whole_number("shortest", self.shortest) > whole_number("longest", self.longest):
            raise ConfigurationError(f"shortest is {self.shortest}; it needs to be at most longest, {self.longest}")

    def propose(self, texts: Mapping[int, Sequence[int]], count: int) -> dict[int, list[int]]:
        """At most `count` tokens for each text."""
        return {number: self._followed(text, count) for number, text in texts.items()}

    def forget(self, number: int) -> None:
        """Nothing is kept."""

    def _followed(self, text: Sequence[int], count: int) -> list[int]:
        tokens = array("q", text)
        numbers, size = tokens.tobytes(), tokens.itemsize
        for length in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            end = len(numbers) - size  # the last tokens themselves are no earlier place
            while (place := numbers.rfind(numbers[-length * size :], 0, end)) >= 0:
                if place % size == 0:
                    first = place // size + length
                    return tokens[first : first + count].tolist()
                end = place + length * size - 1
        return []


class DraftModel:
    """The likeliest next tokens by a small model of the same vocabulary, for all texts at once.

    Args:
        model: of layers with keys of their own, as `PagedModel` needs.
        pages: of its memory; texts that do not fit go without a draft.

    Raises:
        ConfigurationError: as `PagedModel`.
    """

    def __init__(self, model: LanguageModel, pages: int, size: int = PAGE) -> None:
        self.paged = PagedModel(model, pages, size)
        self._sequences: dict[int, PagedSequence] = {}

    def propose(self, texts: Mapping[int, Sequence[int]], count: int) -> dict[int, list[int]]:
        """`count` tokens for each text that the model has read as far as its last token."""
        parts = [(number, self._agreeing(number, text), text) for number, text in texts.items()]
        drafts: dict[int, list[int]] = {}
        budget, step = READ_AT_ONCE, []
        for number, sequence, text in parts:
            missing = list(text[len(sequence) : len(sequence) + budget])
            budget -= len(missing)
            if missing:
                step.append((number, sequence, missing, len(sequence) + len(missing) == len(text)))
        for _ in range(count):
            step = self._next(step, drafts) if step else []
        return drafts

    def forget(self, number: int) -> None:
        """Give the pages of a text back."""
        if (sequence := self._sequences.pop(number, None)) is not None:
            sequence.end()

    def _agreeing(self, number: int, text: Sequence[int]) -> PagedSequence:
        """The sequence of a text, cut to what it has in common with it."""
        sequence = self._sequences.get(number)
        if sequence is None:
            sequence = self._sequences[number] = self.paged.sequence(number)
        most = min(len(sequence), len(text) - 1)
        same = next((i for i in range(most) if sequence.tokens[i] != text[i]), most)
        sequence.truncate(same)
        return sequence

    def _next(
        self, step: list[tuple[int, PagedSequence, list[int], bool]], drafts: dict[int, list[int]]
    ) -> list[tuple[int, PagedSequence, list[int], bool]]:
        """Read the next tokens, add to the drafts of texts that are read, and return what is to be read next."""
        try:
            features = self.paged.read([(sequence, tokens) for _, sequence, tokens, _ in step])
        except PagesExhausted:
            for number, *_ in step:
                self.forget(number)
            return []
        ends, after = [], []
        row = -1
        for number, sequence, tokens, is_read in step:
            row += len(tokens)
            if is_read:
                ends.append(row)
                after.append((number, sequence))
        if not ends:
            return []
        chosen = self.paged.model.logits(features[ends]).argmax(-1).tolist()
        for (number, _), token in zip(after, chosen, strict=True):
            drafts.setdefault(number, []).append(token)
        return [(number, sequence, [token], True) for (number, sequence), token in zip(after, chosen, strict=True)]
