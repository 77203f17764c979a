"""Beam search for translations that hold given phrases: a beam for each number of their tokens that has been said.

Shapes: N sentences, P phrases of each at most, L tokens of a phrase at most, A different tokens in the phrases of a
sentence at most, R rows, which are the beams of all sentences, M continuations of all rows, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regard.errors import ConfigurationError, RegardError
from regard.translation.alignment_choice import AlignmentChoice, one_map
from regard.translation.search import (
    EXTRA_LENGTH,
    BeamHypothesis,
    SearchableModel,
    SearchStep,
    StepWeights,
    length_penalty,
    trace,
)
from regard.translation.settings import SearchSettings
from regard.translation.vocabulary import OWN_IDS, SpecialIds

POINTED = 0.5
"""The share of attention that says a phrase: a word is often looked at twice, by an article and by the word itself."""
ANY_HEAD = AlignmentChoice()
"""The mean over all layers and heads."""


class Phrase(NamedTuple):
    """Tokens that a translation has to say one after the other, so many times.

    source: the places of the source's tokens that it translates; none where that is not known.
    """

    ids: tuple[int, ...]
    times: int = 1
    source: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many tokens of a translation it takes."""
        return len(self.ids) * self.times


class WordEdges(NamedTuple):
    """Which tokens of a vocabulary go on with the word before them, and which end in a letter: bool, [V] each."""

    joins: Tensor
    ends_in_letter: Tensor

    def extended(self, source: Tensor) -> WordEdges:
        """With the tokens of a source that are behind the vocabulary: words, which a translator copies."""
        lacking = max(int(source.max()) + 1 - len(self.joins), 0)
        return WordEdges(*(functional.pad(of, (0, lacking)) for of in self))


@torch.no_grad()
def constrained_search(
    model: SearchableModel,
    source: Tensor,
    source_lengths: Tensor,
    phrases: Sequence[Sequence[Phrase]],
    edges: WordEdges,
    settings: SearchSettings,
    *,
    alignment: AlignmentChoice = ANY_HEAD,
    observe: bool = True,
    special: SpecialIds = OWN_IDS,
) -> list[list[BeamHypothesis]]:
    """The n best translations Y of each source X that hold its phrases: max log Q(Y | X) / penalty, as `beam_search`.

    A phrase that translates words of the source is said where the model looks at them, since a model seldom expects it.
    With a_p, half of the attention that step t pays to the source of phrase p, in `alignment`, while p has not been
    said,

        Q(y_t = p, all of it) = a_p,        Q(y_t = y) = (1 - Σ_p a_p) P(y | y_1 ... y_{t-1}, X),

    and a phrase that comes about both ways has the sum of both. Of a phrase without a source a_p is 0, and where there
    are no others, or there is no attention, Q is P.

    A grid of beams: with C tokens in all phrases of a sentence, grid[t][c] has the K best Y of t tokens that have said
    c of them,

        grid[t][c] = K best of { Y·y : Y in grid[t - 1][c'], c = said(Y·y) },

    where said counts the tokens of the phrases that are complete, and of those that Y·y has just begun; a phrase that
    is begun and not gone on with counts no more. From each Y tried are the K best tokens y and all tokens of phrases.
    END follows only where c = C. Time and memory grow with C + 1.

    A phrase is said as whole words: no token that goes on with a word comes right before or behind its letters, by
    `edges`. Phrases may overlap one another, as "York" in "New York"; `times` of one do not. A hypothesis' `score` is
    of Q, its `log_probability` the model's own. `settings.method` is "exact" here, whatever it says. The longest
    translation is longer by what is forced; arguments and the rest are those of `beam_search`.

    Raises:
        ConfigurationError: the phrases have more tokens than the model allows in a translation.
        RegardError: the model's logits hold NaN, or forbid a phrase.

    Source: Hokamp and Liu 2017 (arXiv 1704.07138), algorithm 1. They go on with a phrase that is begun whatever the
    model says; here it may be left, as in Post and Vilar 2018 (arXiv 1804.06609), who share out one beam. Attention
    places terms as in Hasler et al. 2018 (arXiv 1805.03750); Q, which mixes as pointers do, is ours.
    """
    if len(source) == 0:
        return []
    tables = PhraseTables.of(phrases, edges.extended(source), source.shape[1])
    looks = bool(tables.sources.any())
    record = _ConstrainedRecord(source_lengths.tolist(), tables, settings, model.max_target_length)
    memory = model.encode(source, source_lengths)
    state = model.start(memory)
    beams = _Beams.initial(tables, special)
    while True:
        if observe or looks:
            step = model.observe_step(beams.tokens, state, memory)
            attention = StepWeights(step.weights, step.self_weights) if observe else StepWeights()
            pointed = beams.pointed_at(step.weights, alignment, tables) if looks else None
        else:
            step, attention, pointed = model.step(beams.tokens, state, memory), StepWeights(), None
        logits = step.logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_p = _log_probabilities(logits, settings, special)
        following = record.advance(beams, log_p, pointed, attention, special)
        if len(following.tokens) == 0:
            return record.hypotheses()
        state = step.state.reorder(following.parents)
        if not torch.equal(following.sentences, beams.sentences):
            memory = memory.reorder(following.parents)
        beams = following


def _log_probabilities(logits: Tensor, settings: SearchSettings, special: SpecialIds) -> Tensor:
    """Log P of each token, -inf of what is never said."""
    never = torch.tensor(special.never_said, dtype=torch.int64, device=logits.device)
    if settings.renormalize:
        return logits.index_fill(-1, never, -torch.inf).log_softmax(-1)
    return logits.log_softmax(-1).index_fill(-1, never, -torch.inf)


@dataclass(frozen=True)
class PhraseTables:
    """The phrases of a batch, as automata: how many first tokens of a phrase have just been said, after each token."""

    alphabet: Tensor
    """[N, A], the tokens of the phrases of each sentence, repeated behind the last."""
    known: Tensor
    """[N, A], False for what is repeated."""
    following: Tensor
    """[N, P, L, A + 1], what has been said after so many tokens of a phrase and one of the alphabet, or another one."""
    lengths: Tensor
    """[N, P], tokens of each phrase."""
    times: Tensor
    """[N, P], how often it has to be said; 0 for padding."""
    starts_inside: Tensor
    """[N, P], whether its first token could go on with a word."""
    ends_open: Tensor
    """[N, P], whether it ends in a letter, so that a word could go on behind it."""
    sources: Tensor
    """[N, P, S], 1 for the tokens of the source that a phrase translates."""
    edges: WordEdges

    @classmethod
    def of(cls, phrases: Sequence[Sequence[Phrase]], edges: WordEdges, width: int) -> PhraseTables:
        """The automata of the phrases of each sentence."""
        count = max(map(len, phrases))
        longest = max(len(phrase.ids) for some in phrases for phrase in some)
        alphabets = [list(dict.fromkeys(token for phrase in some for token in phrase.ids)) for some in phrases]
        most, shape = max(map(len, alphabets)), (len(phrases), count)
        device = edges.joins.device
        following = torch.zeros(*shape, longest, most + 1, dtype=torch.int64)
        lengths, times = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        inside, opens = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        sources = torch.zeros(*shape, width)
        for row, some in enumerate(phrases):
            for column, phrase in enumerate(some):
                lengths[row, column], times[row, column] = len(phrase.ids), phrase.times
                inside[row, column] = edges.joins[phrase.ids[0]]
                opens[row, column] = edges.ends_in_letter[phrase.ids[-1]]
                sources[row, column, list(phrase.source)] = 1
                for said in range(len(phrase.ids)):
                    for symbol, token in enumerate(alphabets[row]):
                        following[row, column, said, symbol] = _said_after(phrase.ids, said, token)
        return cls(
            torch.tensor([some + some[-1:] * (most - len(some)) for some in alphabets], device=device),
            torch.tensor([[place < len(some) for place in range(most)] for some in alphabets], device=device),
            *(tensor.to(device) for tensor in (following, lengths, times, inside, opens, sources)),
            edges=edges,
        )

    @property
    def sizes(self) -> Tensor:
        """Tokens of all phrases of each sentence, C: [N]."""
        return (self.lengths * self.times).sum(1)


def _said_after(phrase: tuple[int, ...], said: int, token: int) -> int:
    """The most first tokens of a phrase that its first `said` ones and another token end in.

    >>> [_said_after((5, 5, 6), 2, token) for token in (5, 6, 7)]
    [2, 3, 0]
    """
    text = (*phrase[:said], token)
    return next(count for count in range(len(text), -1, -1) if text[len(text) - count :] == phrase[:count])


@dataclass(frozen=True)
class _Beams:
    """The rows of the model's next step, by sentence and by what has been said of its phrases."""

    sentences: Tensor  # [R]
    log_probabilities: Tensor  # [R]: the model's own
    generated: Tensor  # [R]: log Q of the tokens, if no phrase has been begun because of its source
    placed: Tensor  # [R, P]: log Q of the tokens, if the phrase that is begun was because of its source
    tokens: Tensor  # [R]
    parents: Tensor  # [R]: the row of the step before that each continues
    times: Tensor  # [R, P]: how often each phrase has been said
    begun: Tensor  # [R, P]: how many of its first tokens have just been said
    closed: Tensor  # [R]: whether a phrase has just ended in a letter
    forced: int | None = None
    """The only token that may follow; None: any."""

    @classmethod
    def initial(cls, tables: PhraseTables, special: SpecialIds) -> _Beams:
        """One beam for each sentence."""
        every = torch.arange(len(tables.times), device=tables.times.device)
        nothing = torch.zeros_like(tables.times)
        numbers = torch.zeros(len(every), device=every.device)
        begin, never = torch.full_like(every, special.begin), torch.full(nothing.shape, -torch.inf, device=every.device)
        return cls(every, numbers, numbers, never, begin, every, nothing, nothing, numbers.bool(), special.first)

    @property
    def scores(self) -> Tensor:
        """Log Q: [R]."""
        return torch.cat([self.generated[:, None], self.placed], 1).logsumexp(1)

    def pointed_at(self, weights: Tensor, alignment: AlignmentChoice, tables: PhraseTables) -> Tensor:
        """a_p: the share of attention to the source of each phrase that has to be said and is not begun: [R, P]."""
        looked = one_map(weights, alignment.layer, alignment.head).float()  # [R, S]
        pointed = (tables.sources[self.sentences] @ looked[:, :, None])[..., 0]
        there = (self.times < tables.times[self.sentences]) & (self.begun == 0)
        pointed = pointed.clamp(0, 1) * there
        return POINTED * pointed / pointed.sum(1, keepdim=True).clamp(min=1)

    def complete(self, tables: PhraseTables) -> Tensor:
        """[R], whether all phrases have been said."""
        return (self.times >= tables.times[self.sentences]).all(1)

    def said(self, tables: PhraseTables) -> Tensor:
        """[R], tokens of the phrases that have been said."""
        return (self.times * tables.lengths[self.sentences] + self.begun).sum(1)

    def chosen(self, rows: Tensor) -> _Beams:
        """Some of the rows."""
        return _Beams(
            self.sentences[rows],
            self.log_probabilities[rows],
            self.generated[rows],
            self.placed[rows],
            self.tokens[rows],
            self.parents[rows],
            self.times[rows],
            self.begun[rows],
            self.closed[rows],
        )

    def extended(self, log_p: Tensor, pointed: Tensor, count: int, tables: PhraseTables) -> _Beams:
        """The continuations by each token of the phrases and by the `count` best others: [M].

        log_p is [R, V], and `pointed` [R, P] the attention to the source of each phrase.
        """
        forced, known = tables.alphabet[self.sentences], tables.known[self.sentences]  # [R, A]
        if self.forced is not None:
            tokens, more = torch.full_like(self.tokens, self.forced)[:, None], torch.zeros_like(log_p[:, :1])
            symbols = torch.full_like(tokens, forced.shape[1])
        else:
            of_phrases = log_p.gather(1, forced).masked_fill(~known, -torch.inf)
            others = log_p.scatter(1, forced, -torch.inf).topk(min(count, log_p.shape[1]))
            tokens, more = torch.cat([forced, others.indices], 1), torch.cat([of_phrases, others.values], 1)
            symbols = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=forced.shape[1]).expand_as(tokens)
        rows, places = (more > -torch.inf).nonzero(as_tuple=True)
        return self._by(rows, tokens[rows, places], symbols[rows, places], more[rows, places], pointed, tables)

    def _by(
        self, rows: Tensor, tokens: Tensor, symbols: Tensor, log_p: Tensor, pointed: Tensor, tables: PhraseTables
    ) -> _Beams:
        """Each of the rows followed by a token, which is the given one of its sentence's alphabet, with its log P."""
        sentences, times = self.sentences[rows], self.times[rows]
        every = torch.arange(times.shape[1], device=rows.device)
        begun = tables.following[sentences[:, None], every, self.begun[rows], symbols[:, None]]
        in_word = tables.edges.ends_in_letter[self.tokens[rows]][:, None] & tables.starts_inside[sentences]
        goes_on = (begun == self.begun[rows] + 1) & (begun > 1)
        begun = begun.where(~in_word | goes_on, 0)
        wanted = times < tables.times[sentences]
        ended = wanted & (begun == tables.lengths[sentences])
        begins = wanted & (self.begun[rows] == 0) & (begun == 1)
        placed = torch.where(begins, self.generated[rows, None] + pointed.log()[rows], -torch.inf)
        placed = self.placed[rows].where(wanted & goes_on, placed)
        generated = self.generated[rows] + (1 - pointed.sum(1)).clamp(min=0).log()[rows] + log_p
        said = placed.masked_fill(~ended, -torch.inf)
        return _Beams(
            sentences,
            self.log_probabilities[rows] + log_p,
            torch.cat([generated[:, None], said], 1).logsumexp(1),
            placed.masked_fill(ended, -torch.inf),
            tokens,
            rows,
            times + ended,
            begun.where(wanted & ~ended, 0),
            (ended & tables.ends_open[sentences]).any(1),
        )


def best_of_groups(groups: Tensor, scores: Tensor, count: int) -> Tensor:
    """The places of the `count` best scores of each group, group by group, the best first.

    >>> best_of_groups(torch.tensor([1, 0, 1, 1]), torch.tensor([0.5, 2.0, 0.9, 0.7]), 2)
    tensor([1, 2, 3])
    """
    order = scores.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]
    ordered = groups[order]
    first = torch.searchsorted(ordered, ordered)  # where the group of each begins
    return order[torch.arange(len(order), device=order.device) - first < count]


class _CompleteEnding(NamedTuple):
    """A hypothesis with all phrases that has ended: its last token, and the row that it extends."""

    score: float
    log_probability: float
    length: int
    row: int
    token: int
    finished: bool


class _ConstrainedRecord:
    """The history of a search: every step, and every hypothesis that ended."""

    def __init__(
        self, source_lengths: list[int], tables: PhraseTables, settings: SearchSettings, longest: int | None
    ) -> None:
        self._tables, self._settings, self._source_lengths = tables, settings, source_lengths
        # Between two phrases there may have to be a space, which is a token of its own in some vocabularies.
        forced = (tables.sizes + tables.times.sum(1)).tolist()
        if longest is not None and max(forced) >= longest:
            raise ConfigurationError(
                f"the forced words have up to {max(forced):,} tokens and the spaces between them, and a translation of "
                f"this model {longest:,} at most: force fewer"
            )
        limits = [
            math.ceil(length * settings.max_length_ratio) + EXTRA_LENGTH + more
            for length, more in zip(source_lengths, forced, strict=True)
        ]
        self._limits = [limit if longest is None else min(limit, longest) for limit in limits]
        self._endings: list[list[_CompleteEnding]] = [[] for _ in limits]
        self._history: list[SearchStep] = []

    def advance(
        self, beams: _Beams, log_p: Tensor, pointed: Tensor | None, attention: StepWeights, special: SpecialIds
    ) -> _Beams:
        """Record one step, and return the beams that continue."""
        self._history.append(SearchStep(beams.tokens, beams.parents, attention))
        tables = self._tables
        log_p = log_p.masked_fill(beams.closed[:, None] & tables.edges.joins[: log_p.shape[1]], -torch.inf)
        if beams.forced is None:
            ends = log_p[:, special.end]
            self._record(beams, ends.masked_fill(~beams.complete(tables), -torch.inf), special.end)
            log_p[:, special.end] = -torch.inf
        pointed = beams.placed.new_zeros(beams.placed.shape) if pointed is None else pointed
        grown = beams.extended(log_p, pointed, self._settings.beam, tables)
        groups = grown.sentences * (int(tables.sizes.max()) + 1) + grown.said(tables)
        kept = grown.chosen(best_of_groups(groups, grown.scores, self._settings.beam))
        return kept.chosen(self._staying(kept).nonzero()[:, 0])

    def _record(self, beams: _Beams, ends: Tensor, end: int) -> None:
        """Record the rows that END follows, with this log P of END; -inf: it does not."""
        length = len(self._history)
        scores, totals = (beams.scores + ends) / self._penalty(length), beams.log_probabilities + ends
        for row in (ends > -torch.inf).nonzero()[:, 0].tolist():
            ending = _CompleteEnding(float(scores[row]), float(totals[row]), length, row, end, finished=True)
            self._endings[int(beams.sentences[row])].append(ending)

    def _penalty(self, length: int) -> float:
        return length_penalty(length, self._settings.length_penalty, self._settings.penalty_form)

    def _staying(self, kept: _Beams) -> Tensor:
        """[R], whether the sentence of each row goes on; records what is cut at the longest length."""
        length, complete = len(self._history), kept.complete(self._tables)
        best = torch.full((len(self._limits),), -torch.inf, device=kept.tokens.device)
        best = best.scatter_reduce(0, kept.sentences, kept.scores.float(), "amax")
        stays = []
        for sentence, (limit, bound) in enumerate(zip(self._limits, best.tolist(), strict=True)):
            finished = sorted((one.score for one in self._endings[sentence] if one.finished), reverse=True)
            worst = finished[self._settings.n_best - 1] if len(finished) >= self._settings.n_best else -math.inf
            # No token adds to log P, and no length that is allowed divides it by more than the longest one.
            stays.append(length < limit and bound / self._penalty(limit) > worst)
        at_limit = torch.tensor([length >= limit for limit in self._limits], device=kept.tokens.device)
        scores = kept.scores / self._penalty(length)
        for place in (at_limit[kept.sentences] & complete).nonzero()[:, 0].tolist():
            total, parent, token = kept.log_probabilities[place], int(kept.parents[place]), int(kept.tokens[place])
            ending = _CompleteEnding(float(scores[place]), float(total), length, parent, token, finished=False)
            self._endings[int(kept.sentences[place])].append(ending)
        return torch.tensor(stays, device=kept.tokens.device)[kept.sentences]

    def hypotheses(self) -> list[list[BeamHypothesis]]:
        """The n best of each sentence by score, finished ones before those that were cut."""
        best = [
            sorted(endings, key=lambda one: (not one.finished, -one.score))[: self._settings.n_best]
            for endings in self._endings
        ]
        if not all(best):
            raise RegardError(
                f"sentence {best.index([])} of the batch has no translation with the forced words: the model gives "
                "them no probability; its logits hold NaN or -inf"
            )
        traced = iter(trace(self._history, [(ending.length, ending.row) for endings in best for ending in endings]))
        return [
            [self._hypothesis(ending, length, *next(traced)) for ending in endings]
            for endings, length in zip(best, self._source_lengths, strict=True)
        ]

    @staticmethod
    def _hypothesis(
        ending: _CompleteEnding, width: int, tokens: list[int], weights: Tensor | None, self_weights: Tensor | None
    ) -> BeamHypothesis:
        length, last = ending.length, () if ending.finished else (ending.token,)
        weights = torch.zeros(length, 0, width) if weights is None else weights[:length, ..., :width].clone()
        looked = torch.zeros(length, 0, length) if self_weights is None else self_weights[:length, ..., :length].clone()
        ids = (*tokens[1:length], *last)
        return BeamHypothesis(ids, ending.score, ending.log_probability, weights, looked, ending.finished)
