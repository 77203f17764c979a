"""One text that a batch continues: what was asked for, and what there is of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...attention import Observation
from ...lenses import Lens
from ...nn.caches import PagedSequence
from .generation import Sampling


@dataclass(frozen=True)
class TokenChances:
    """log p of a new token, and of the likeliest ones, (token, log p), before temperature, top-k and top-p."""

    log_probability: float
    likeliest: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, logits: Tensor, token: int, count: int) -> TokenChances:
        """Of logits (vocabulary,), with the `count` likeliest tokens."""
        chances = logits.float().log_softmax(-1)
        top = chances.topk(min(count, len(chances)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return cls(float(chances[token]), tuple(pairs))


@dataclass(frozen=True, eq=False)
class NewToken:
    """A token that a step has computed for a continuation.

    reason: why the text ends with it, as `Continuation.reason`. chances: where they were asked for. observed: what each
    layer's attention gave, for the query that the token was predicted from, of a continuation with lenses.
    """

    continuation: Continuation
    token: int
    reason: str | None = None
    chances: TokenChances | None = None
    observed: tuple[Observation, ...] = ()


@dataclass(eq=False)
class Continuation:
    """A text, and how it is continued; made by `ContinuousBatch.add`.

    tokens: the new ones so far. reason: why it has ended: "stop", "length" or "cancelled"; None until then.
    """

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling | None
    stop: frozenset[int]
    generator: torch.Generator | None
    lenses: tuple[Lens, ...] = ()
    likeliest: int | None = None
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    sequence: PagedSequence | None = field(default=None, repr=False)

    @property
    def text(self) -> list[int]:
        """All tokens: the prompt's and the new ones."""
        return [*self.prompt, *self.tokens]

    @property
    def length(self) -> int:
        """The number of all tokens."""
        return len(self.prompt) + len(self.tokens)

    @property
    def unread(self) -> int:
        """How many of all tokens the model has not read: 1 where the next token follows."""
        return self.length - (0 if self.sequence is None else len(self.sequence))

    def unread_tokens(self, count: int) -> list[int]:
        """The first `count` of them."""
        read = self.length - self.unread
        if read >= len(self.prompt):
            return self.tokens[read - len(self.prompt) : read - len(self.prompt) + count]
        return self.text[read : read + count]

    def draw(self, logits: Tensor) -> int:
        """The next token, from logits (vocabulary,)."""
        if self.sampling is None:
            return int(logits.argmax())
        return int(self.sampling(logits.unsqueeze(0), self.generator))

    def take(self, token: int) -> None:
        """Add a new token, and end where it or the length ends it."""
        self.tokens.append(token)
        if token in self.stop:
            self.reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens:
            self.reason = "length"
