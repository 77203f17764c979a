"""Continuous batching: texts join and leave a running batch, whose steps read all that is there to be read."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import ConfigurationError, PagesExhausted, ShapeError
from ...lenses import Lens
from ...nn.caches import CacheFormat, PagedSequence
from ...nn.caches.paged_memory import PAGE
from ...utils.numbers import whole_number
from .continuation import Continuation, NewToken, TokenChances
from .drafts import Draft, check_draft
from .generation import Sampling, check_sampling
from .paged_model import PagedModel
from .token_inputs import stop_tokens

if TYPE_CHECKING:
    from .language_model import LanguageModel

CHUNK = 512
"""Tokens of a step, so that those who wait for their next token do not wait for a whole prompt of another."""


@dataclass
class BatchCounts:
    """What a batch has done so far, in tokens: read, found in pages, new ones, drafted, and accepted of these.

    interrupted: how often a text had to give its pages to one that came before it.
    """

    read: int = 0
    found: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    interrupted: int = 0


@dataclass(frozen=True, eq=False)
class _Turn:
    """What a step reads of a continuation: its own next tokens, and those of a draft.

    ends: whether that is all of it, so that a new token follows.
    """

    continuation: Continuation
    tokens: list[int]
    draft: list[int]
    ends: bool

    @classmethod
    def of(cls, continuation: Continuation, count: int, draft: list[int] | None = None) -> _Turn:
        """Its next `count` tokens."""
        return cls(continuation, continuation.unread_tokens(count), draft or [], count == continuation.unread)


class ContinuousBatch:
    """Continue many texts with one model, each as if it were alone: `add` texts at any time, and `step` until all end.

    A step reads the last token of every text that is being continued, then as many tokens of new prompts as a chunk has
    room for. Keys are in pages; texts that begin alike share them. Where pages run out, the text that came last gives
    its own back, and is read again, what was generated too, when there is room: nothing is lost.

    Greedy tokens are those of `LanguageModel.generate` for the text alone, sampled ones too with a generator of the
    same seed, unless two tokens are so close that rounding decides: products of more rows are summed in another order.

    The model is used as it is: call `eval()` before, where it drops anything in training. One thread may use a batch.

    Args:
        model: of layers with keys of their own, as `PagedModel` needs.
        pages: of the memory, for all texts together; a page has `size` tokens.
        most: texts that are continued at the same time; others wait.
        chunk: tokens of a step, beside the last ones of texts that are being continued.
        draft: what proposes `drafted` tokens of each text, which one step checks: `PromptLookup` or `DraftModel`.
        cache_format: how keys and values are stored, as `CacheFormat()` in 8 bits; tokens are those of `generate` with
            a cache that is `packed` so.

    Raises:
        ConfigurationError: numbers that are no integers of at least 1; as `PagedModel`.

    >>> from regard.models import language_model as lm
    >>> attention, feed_forward = lm.AttentionConfig(num_heads=2), lm.FeedForwardConfig(16)
    >>> model = lm.LanguageModel(lm.LanguageModelConfig(9, 8, (lm.LayerConfig(),), attention, feed_forward)).eval()
    >>> batch = ContinuousBatch(model, pages=8, size=4)
    >>> first, second = batch.add([3, 1, 4], 5), batch.add([1, 5], 2)
    >>> while not batch.is_empty:
    ...     new = batch.step()
    >>> len(first.tokens), len(second.tokens), first.reason
    (5, 2, 'length')
    """

    def __init__(
        self,
        model: LanguageModel,
        pages: int,
        size: int = PAGE,
        *,
        most: int = 64,
        chunk: int = CHUNK,
        draft: Draft | None = None,
        drafted: int = 4,
        cache_format: CacheFormat | None = None,
    ) -> None:
        self.paged = PagedModel(model, pages, size, cache_format=cache_format)
        self.most, self.chunk = whole_number("most", most), whole_number("chunk", chunk)
        check_draft(draft)
        self.draft, self.drafted = draft, whole_number("drafted", drafted)
        self.counts = BatchCounts()
        self.waiting: deque[Continuation] = deque()
        self.running: list[Continuation] = []
        self._numbers = itertools.count(1)

    @property
    def is_empty(self) -> bool:
        """Whether no text is being continued, or waits for it."""
        return not (self.running or self.waiting)

    def add(
        self,
        tokens: Sequence[int] | Tensor,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: int | Collection[int] = (),
        seed: int | None = None,
        lenses: Sequence[Lens] = (),
        likeliest: int | None = None,
    ) -> Continuation:
        """Continue a text from the next step on.

        Args:
            tokens: the text, with one token at least.
            max_new_tokens: after so many it ends.
            sampling: how to draw; the likeliest token without it.
            stop: the token, or tokens, that end it.
            seed: of its own generator; without one draws differ each time.
            lenses: on the weights of the query that each new token is predicted from, in every layer.
            likeliest: log p of each new token is wanted, and of so many of the likeliest.

        Raises:
            ShapeError: no tokens, or some that the vocabulary does not have.
            PagesExhausted: the text, as long as it may become, does not fit into the memory even alone.
            ConfigurationError: a number out of its range.
        """
        check_sampling(sampling)
        prompt = self._checked(tokens)
        count = whole_number("max_new_tokens", max_new_tokens)
        pool, size = self.paged.memory.pool, self.paged.model.config.vocabulary_size
        if pool.pages_for(len(prompt) + count) > pool.count:
            raise PagesExhausted(
                f"the text has {len(prompt)} tokens and may get {count} more, which are "
                f"{pool.pages_for(len(prompt) + count)} pages of {pool.size}, but the memory has {pool.count}: make it "
                "larger, or ask for fewer"
            )
        generator = torch.Generator(self.paged.memory.device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(whole_number("seed", seed, least=-sys.maxsize))
        stops = frozenset(stop_tokens(stop, size))
        if likeliest is not None:
            whole_number("likeliest", likeliest, least=0)
        added = Continuation(next(self._numbers), prompt, count, sampling, stops, generator, tuple(lenses), likeliest)
        self.waiting.append(added)
        return added

    def cancel(self, continuation: Continuation) -> None:
        """End a text before its time, and give its pages back; nothing of one that has ended already."""
        if continuation.reason is None:
            continuation.reason = "cancelled"
            self._leave(continuation)

    def step(self) -> list[NewToken]:
        """Read the next tokens of texts, as many as a step has, and return the new tokens that follow from them."""
        if self.is_empty:
            return []
        turns = self._turns()
        lenses = {number: turn.continuation.lenses for number, turn in enumerate(turns) if self._is_watched(turn)}
        features = self.paged.read([(_sequence(turn.continuation), turn.tokens + turn.draft) for turn in turns], lenses)
        self.counts.read += len(features)
        new = self._chosen(turns, features)
        for turn in turns:
            if turn.continuation.sequence is not None:
                turn.continuation.sequence.share()
        return new

    def _checked(self, tokens: Sequence[int] | Tensor) -> tuple[int, ...]:
        prompt = tuple(tokens.tolist() if isinstance(tokens, Tensor) else tokens)
        size = self.paged.model.config.vocabulary_size
        if not prompt or not all(isinstance(token, int) and 0 <= token < size for token in prompt):
            wrong = next((token for token in prompt if not (isinstance(token, int) and 0 <= token < size)), None)
            has = "no tokens" if not prompt else f"{wrong!r}"
            raise ShapeError(
                f"the text has {has}; it needs one token at least to go on from, whole numbers in 0..{size - 1}"
            )
        return prompt

    def _turns(self) -> list[_Turn]:
        """What the next step reads; texts that came last give up their pages where others need them."""
        self._make_room()
        ready = [each for each in self.running if each.unread == 1]
        reading = [each for each in self.running if each.unread > 1]
        read, budget = [], self.chunk
        while budget > 0 and (reading or self._admits()):
            each = reading.pop(0) if reading else self._admit()
            self.counts.found += _sequence(each).adopt(each.text)
            # Its last token comes alone where lenses look at what follows from it.
            count = min(each.unread - bool(each.lenses and each.unread > 1), budget)
            budget -= count
            read.append(_Turn.of(each, count))
        drafts = self._drafts(ready)
        return [*(_Turn.of(each, 1, drafts.get(each.number)) for each in ready), *read]

    def _make_room(self) -> None:
        """Let the texts that came last wait again, until each other has a page for its next tokens."""
        pool = self.paged.memory.pool
        while self._needed() > pool.free:
            last = self.running.pop()
            self._give_back(last)
            self.waiting.appendleft(last)
            self.counts.interrupted += 1

    def _needed(self) -> int:
        """Pages that the running texts lack for what they have, their prompts whole, and one token more."""
        return sum(self._lacking(each, each.length) for each in self.running)

    def _lacking(self, continuation: Continuation, length: int) -> int:
        held = 0 if continuation.sequence is None else len(continuation.sequence.pages)
        return max(self.paged.memory.pool.pages_for(length) - held, 0)

    def _admits(self) -> bool:
        """Whether the first text that waits can join: there is room for all of it, and one token more."""
        if not self.waiting or len(self.running) >= self.most:
            return False
        first = self.waiting[0]
        first.sequence = self.paged.sequence(f"text {first.number}")
        first.sequence.adopt(first.text)
        if self._needed() + self._lacking(first, first.length + 1) <= self.paged.memory.pool.free:
            self.counts.found += len(first.sequence)
            return True
        self._give_back(first)
        return False

    def _admit(self) -> Continuation:
        self.running.append(self.waiting.popleft())
        return self.running[-1]

    def _drafts(self, ready: Sequence[Continuation]) -> dict[int, list[int]]:
        """Drafts of texts that have room for them, and no lenses."""
        if self.draft is None:
            return {}
        texts = {
            each.number: each.text for each in ready if not each.lenses and each.max_new_tokens - len(each.tokens) > 1
        }
        drafts: dict[int, list[int]] = {}
        room = self.paged.memory.pool.free - self._needed()
        proposed = self.draft.propose(texts, self.drafted) if texts else {}  # type: ignore[arg-type]
        for each in ready:
            most = each.max_new_tokens - len(each.tokens) - 1
            draft = proposed.get(each.number, [])[:most]
            pages = self._lacking(each, each.length + len(draft)) - self._lacking(each, each.length)
            if draft and pages <= room:
                room -= pages
                drafts[each.number] = draft
                self.counts.drafted += len(draft)
        return drafts

    def _is_watched(self, turn: _Turn) -> bool:
        return bool(turn.continuation.lenses) and turn.ends

    def _chosen(self, turns: Sequence[_Turn], features: Tensor) -> list[NewToken]:
        """The new tokens that follow from the step, of drafts as many as were right and one more."""
        rows, row = [], 0
        for turn in turns:
            row += len(turn.tokens) + len(turn.draft)
            if turn.ends:
                rows.extend(range(row - len(turn.draft) - 1, row))
        if not rows:
            return []
        with torch.no_grad():
            logits = self.paged.model.logits(features[rows])
        new, first = [], 0
        for number, turn in enumerate(turns):
            if turn.ends:
                own = logits[first : first + len(turn.draft) + 1]
                first += len(own)
                new.extend(self._follow(turn, own, number))
        return new

    def _follow(self, turn: _Turn, logits: Tensor, number: int) -> list[NewToken]:
        """The tokens that follow a text, from the logits of its last token and of those of its draft."""
        each, new = turn.continuation, []
        sequence, observed = _sequence(each), self.paged.observed.get(number, ())
        for row, drafted in zip(logits, [*turn.draft, None], strict=True):
            token = each.draw(row)
            each.take(token)
            chances = None if each.likeliest is None else TokenChances.of(row, token, each.likeliest)
            new.append(NewToken(each, token, each.reason, chances, observed))
            if token != drafted or each.reason is not None:
                break
        self.counts.generated += len(new)
        self.counts.accepted += len(new) - 1
        sequence.truncate(min(len(sequence), each.length - 1))
        if each.reason is not None:
            self._leave(each)
        return new

    def _leave(self, continuation: Continuation) -> None:
        """Take a text that has ended out, and let others have its pages."""
        if continuation in self.running:
            self.running.remove(continuation)
        elif continuation in self.waiting:
            self.waiting.remove(continuation)
        self._give_back(continuation)
        if self.draft is not None:
            self.draft.forget(continuation.number)

    def _give_back(self, continuation: Continuation) -> None:
        if continuation.sequence is not None:
            continuation.sequence.share()
            continuation.sequence.end()
            continuation.sequence = None


def _sequence(continuation: Continuation) -> PagedSequence:
    """The sequence of a text that is being continued."""
    if continuation.sequence is None:
        raise AssertionError(f"text {continuation.number} is being continued, and has no pages")
    return continuation.sequence


def _seeds_of(texts: Sequence[Sequence[int] | Tensor], seeds: Iterable[int] | None) -> list[int | None]:
    """The seed of each text, None for one that is drawn.

    Raises:
        ConfigurationError: what is no whole number, as many as there are no texts.
    """
    if seeds is None:
        return [None] * len(texts)
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        raise ConfigurationError(f"seeds is {seeds!r}; it needs a list of whole numbers, one for each text")
    found = [whole_number(f"seeds[{number}]", seed, least=-sys.maxsize) for number, seed in enumerate(seeds)]
    if len(found) != len(texts):
        raise ConfigurationError(f"there are {len(found)} seeds for {len(texts)} texts: each needs one")
    return list(found)


def continued(
    model: LanguageModel,
    texts: Sequence[Sequence[int] | Tensor],
    max_new_tokens: int,
    *,
    sampling: Sampling | None,
    stop: int | Collection[int],
    seeds: Iterable[int] | None,
    pages: int | None,
    draft: Draft | None,
    cache_format: CacheFormat | None,
) -> Iterator[tuple[int, int]]:
    """Continue texts as `LanguageModel.generate_many`; arguments are checked before the first token is computed."""
    for number, text in enumerate(texts):
        if not isinstance(text, Sequence | Tensor):
            raise ShapeError(f"text {number} is {text!r}; it needs its tokens, a list or tensor of whole numbers")
    of_each = _seeds_of(texts, seeds)
    count = whole_number("max_new_tokens", max_new_tokens)
    if pages is None:
        pages = max(sum(-(-(len(text) + count) // PAGE) for text in texts), 1)
    batch = ContinuousBatch(model, pages, draft=draft, cache_format=cache_format)
    numbers = {
        batch.add(text, count, sampling=sampling, stop=stop, seed=seed).number: number
        for number, (text, seed) in enumerate(zip(texts, of_each, strict=True))
    }

    def stream() -> Iterator[tuple[int, int]]:
        while not batch.is_empty:
            for new in batch.step():
                yield numbers[new.continuation.number], new.token

    return stream()
