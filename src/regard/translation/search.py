"""Greedy and beam search, and the protocols of the models that it searches: they encode a source and decode in steps.

Shapes: N sentences that are still searched, K beams of each, R = N·K rows, T steps, H hypotheses, S source tokens,
V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from regard.backends.cpu.top_entries import top_entries
from regard.errors import RegardError
from regard.translation.settings import PenaltyForm, SearchSettings
from regard.translation.vocabulary import OWN_IDS, SpecialIds


class Reorderable(Protocol):
    """State of a model with one row per beam."""

    def reorder(self, rows: Tensor) -> Any:
        """The state with rows reordered, repeated or dropped."""
        ...


class DecodingStep(Protocol):
    """Result of one decoding step."""

    @property
    def logits(self) -> Tensor:
        """Logits of the next token: [R, V]."""
        ...

    @property
    def state(self) -> Any:
        """Decoder state for the next step."""
        ...


class ObservedDecodingStep(DecodingStep, Protocol):
    """Result of one decoding step with its attention weights."""

    @property
    def weights(self) -> Tensor:
        """Attention weights to the source: [R, ..., S], with any dims between, such as layers and heads."""
        ...

    @property
    def self_weights(self) -> Tensor | None:
        """Weights to the target so far, this step's token the last: [R, ..., T]; None without self-attention."""
        ...


@runtime_checkable
class RankedStep(Protocol):
    """A decoding step that finds the best next tokens without the logits of all."""

    def best_tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The `count` largest logits of each row, or all, largest first, their tokens, and the log-sum-exp of the row.

        Shapes: (R, count) twice, and (R, 1).
        """
        ...


class SearchableModel(Protocol):
    """A model that beam search can decode; its decoder state is passed in and returned, never stored on the model."""

    @property
    def max_target_length(self) -> int | None:
        """Most target tokens, END included; None: any number."""
        ...

    def encode(self, source: Tensor, source_lengths: Tensor) -> Any:
        """Encoded sources: a `Reorderable`."""
        ...

    def start(self, memory: Any) -> Any:
        """Decoder state before BEGIN: a `Reorderable`."""
        ...

    def step(self, tokens: Tensor, state: Any, memory: Any) -> DecodingStep:
        """Decode one more token [R] of every row."""
        ...

    def observe_step(self, tokens: Tensor, state: Any, memory: Any) -> ObservedDecodingStep:
        """Decode one more token, with attention weights."""
        ...


class TranslationModel(SearchableModel, Protocol):
    """A model that a `Translator` can use: searchable, and with the attention weights of a known translation."""

    @property
    def max_source_length(self) -> int | None:
        """Most source tokens; None: any number."""
        ...

    def attention_weights(self, source: Tensor, source_lengths: Tensor, target: Tensor) -> Tensor:
        """Attention weights [B, T, ..., S] of target [B, T] (BEGIN y1 ...) to source [B, S]."""
        ...

    def eval(self) -> Self:
        """Switch dropout off, and return the model."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters; the model computes on their device."""
        ...


class StepWeights(NamedTuple):
    """Attention weights of a step: to the source [R, ..., S], to the target so far [R, ..., t]; None: not observed."""

    weights: Tensor | None = None
    self_weights: Tensor | None = None


@dataclass(frozen=True)
class SearchStep:
    """One step of all beams: the input tokens, the row of the previous step that each continues, the weights."""

    tokens: Tensor  # [R]
    parents: Tensor  # [R]
    attention: StepWeights


class TracedPath(NamedTuple):
    """The input tokens of one hypothesis, BEGIN first, and the attention weights of its steps."""

    tokens: list[int]
    weights: Tensor | None  # [T, ..., S]
    self_weights: Tensor | None  # [T, ..., T]


def trace(history: Sequence[SearchStep], ends: Sequence[tuple[int, int]]) -> list[TracedPath]:
    """Follow back pointers from each (length, row in the last step) of `ends`; results are on the CPU.

    Values behind a hypothesis' length mean nothing.
    """
    device, steps = history[0].tokens.device, len(history)
    lengths, rows = torch.tensor(ends, device=device).unbind(1)
    tokens = history[0].tokens.new_zeros(len(ends), steps)
    weights = self_weights = None
    for step in reversed(range(steps)):
        lasting = lengths > step  # the others ended before this step
        selected, record = rows[lasting], history[step]
        tokens[lasting, step] = record.tokens[selected]
        weights = _copy_rows(weights, lasting, step, record.attention.weights, selected, None, steps)
        # A cache that evicts keys without a future query has the latest columns.
        self_weights = _copy_rows(self_weights, lasting, step, record.attention.self_weights, selected, step + 1, steps)
        rows[lasting] = record.parents[selected]
    return [
        TracedPath(line, None if weights is None else weights[row], None if self_weights is None else self_weights[row])
        for row, line in enumerate(tokens.tolist())
    ]


def _copy_rows(
    collected: Tensor | None,
    lasting: Tensor,
    step: int,
    weights: Tensor | None,
    rows: Tensor,
    end: int | None,
    steps: int,
) -> Tensor | None:
    """Copy rows of a step's weights into those of all steps, allocated if None, with columns that end at `end`."""
    if weights is None:
        return collected
    columns = weights.shape[-1]
    if collected is None:
        shape = (len(lasting), steps, *weights.shape[1:-1], columns if end is None else steps)
        collected = torch.zeros(shape, dtype=weights.dtype)
    end = columns if end is None else end
    collected[lasting.cpu(), step, ..., end - columns : end] = weights[rows].cpu()
    return collected


EXTRA_LENGTH = 10
"""Tokens that a hypothesis may have beyond `max_length_ratio` times its source: room for the shortest sources."""


@dataclass(frozen=True, eq=False)
class BeamHypothesis:
    """One translation: its tokens without BEGIN and END, its score, and the attention weights of each token.

    `weights` is [T, ..., S] on the CPU: a row for each token and, where `finished`, one more for END; S is the true
    length of the source. `self_weights` is [T, ..., T]: column t is the token that step t was given, BEGIN the first.
    Both are empty, [T, 0, S] and [T, 0, T], where there is nothing to show: the search was not observed, or the model
    does not look at the target. `log_probability` is the model's own, END included; `score` is what `beam_search` ranks
    by. A hypothesis that was cut at the longest length allowed is not `finished`.
    """

    ids: tuple[int, ...]
    score: float
    log_probability: float
    weights: Tensor
    self_weights: Tensor
    finished: bool


@torch.no_grad()
def beam_search(
    model: SearchableModel,
    source: Tensor,
    source_lengths: Tensor,
    settings: SearchSettings,
    *,
    observe: bool = True,
    special: SpecialIds = OWN_IDS,
) -> list[list[BeamHypothesis]]:
    """The n best translations Y of each source X by log P(Y | X) / ((5 + |Y|) / 6)^α, best first.

    Shapes: source [N, S] int64, padded behind; source_lengths [N]. |Y| counts END, which is a factor of P as every
    other token is; α is `settings.length_penalty`, and 0 ranks by probability alone. Where `settings.penalty_form` is
    "length", the score is log P(Y | X) / |Y|^α. A beam of 1 is greedy search. In each step the best K of all
    continuations of a sentence are kept: those that end leave the beam, the others go on. Stopping early changes no
    result: a sentence ends when nothing in its beam can still enter its n best. PAD and BEGIN are never generated:
    `special` says which ids they are, where the target's are not those of `Vocabulary`. At
    `max_length_ratio`·S + `EXTRA_LENGTH` tokens, or the model's `max_target_length`, a hypothesis is cut; cut ones fill
    the places that finished ones leave, and so come last. The model should be in eval mode. Unless `observe` is false,
    every hypothesis has the weights of all its steps, each the model's own at that step, whatever beam it
    came from; it costs the time and memory that they take.

    With `settings.method` "refilled" a beam of two or more is that of transformers: of each sentence the best 2K
    continuations are looked at; those of the best K that end are finished, the best K that do not end go on, and a
    sentence ends when K are finished and the best beam's score at its present length is not above the worst of them, or
    with `settings.stop_early` at once. A hypothesis that is cut has its rank by score, with `settings.forced_end` as if
    END followed with probability 1.

    Where `special.first` is a token, every translation begins with it, whatever the model says: it counts in |Y|, and
    has probability 1.

    Raises:
        RegardError: the model's logits hold NaN, or forbid every continuation.

    Source: Wu et al. 2016, "Google's Neural Machine Translation System" (arXiv 1609.08144), section 7, Eq. 14, without
    the coverage penalty.

    >>> from types import SimpleNamespace
    >>> class Copy:  # says the source again and ends: token t of it is at position t
    ...     encode = staticmethod(lambda source, lengths: Rows(source))
    ...     start = staticmethod(lambda memory: Rows(torch.zeros(len(memory.values), dtype=torch.int64)))
    ...     max_target_length = None
    ...     def observe_step(self, tokens, state, memory):
    ...         now = torch.nn.functional.one_hot(state.values, memory.values.shape[1]).float()
    ...         said = memory.values.gather(1, state.values[:, None])[:, 0]
    ...         logits = 9 * torch.nn.functional.one_hot(said, 8).float()
    ...         return SimpleNamespace(logits=logits, state=Rows(state.values + 1), weights=now, self_weights=None)
    >>> class Rows:
    ...     def __init__(self, values): self.values = values
    ...     def reorder(self, rows): return Rows(self.values[rows])
    >>> settings = SearchSettings(beam=2, length_penalty=0.6)
    >>> [[best]] = beam_search(Copy(), torch.tensor([[5, 7, OWN_IDS.end]]), torch.tensor([3]), settings)
    >>> best.ids, best.weights.argmax(-1).tolist()
    ((5, 7), [0, 1, 2])
    """
    if len(source) == 0:
        return []
    memory = model.encode(source, source_lengths)
    state = model.start(memory)
    live = _LiveBeams.initial(len(source), special, source.device)
    refilled = settings.method == "refilled" and settings.beam > 1
    kind, width = (_RefilledRecord, 2 * settings.beam) if refilled else (_SearchRecord, settings.beam)
    record = kind(source_lengths.to(source.device), settings, model.max_target_length, special.end)
    while True:
        if observe:
            step = model.observe_step(live.tokens, state, memory)
            attention = StepWeights(step.weights, step.self_weights)
        else:
            step, attention = model.step(live.tokens, state, memory), StepWeights()
        following = record.advance(live, _chosen(live, step, width, settings, special), attention)
        if len(following.sentences) == 0:
            return record.hypotheses()
        # A greedy step in which no sentence ends moves nothing; and all beams of a sentence have the same memory.
        moved = not torch.equal(following.parents, torch.arange(len(live.tokens), device=source.device))
        state = step.state.reorder(following.parents) if moved else step.state
        if following.log_probabilities.shape != live.log_probabilities.shape:
            memory = memory.reorder(following.parents)
        live = following


def length_penalty(length: int, alpha: float, form: PenaltyForm = "gnmt") -> float:
    """((5 + length) / 6)^alpha (Wu et al. 2016, Eq. 14), or length^alpha.

    >>> length_penalty(1, 1.0), length_penalty(7, 1.0), length_penalty(7, 0.0), length_penalty(7, 1.0, "length")
    (1.0, 2.0, 1.0, 7.0)
    """
    return ((5 + length) / 6 if form == "gnmt" else float(length)) ** alpha


@dataclass(frozen=True)
class _LiveBeams:
    """The beams that continue: the rows of the model's next step, sentence by sentence."""

    sentences: Tensor  # [N]: index of each in the whole batch
    log_probabilities: Tensor  # [N, K]; -inf is an empty place
    tokens: Tensor  # [R]
    parents: Tensor  # [R]: the row of the step before that each continues
    forced: int | None = None
    """The only token that may follow; None: any."""

    @classmethod
    def initial(cls, sentences: int, special: SpecialIds, device: torch.device) -> _LiveBeams:
        """One beam per sentence, since before the first step all beams would be equal."""
        every = torch.arange(sentences, device=device)
        begin = torch.full_like(every, special.begin)
        return cls(every, torch.zeros(sentences, 1, device=device), begin, every, special.first)


@dataclass(frozen=True)
class _Continuations:
    """The best continuations of each sentence, best first; unused entries have log P = -inf."""

    log_probabilities: Tensor  # [N, K]
    tokens: Tensor  # [N, K]
    parents: Tensor  # [N, K]: the row that each continues


def _chosen(
    live: _LiveBeams, step: DecodingStep, count: int, settings: SearchSettings, special: SpecialIds
) -> _Continuations:
    """The continuations of a step: the best of them, or the one that is forced."""
    if live.forced is not None:
        rows = torch.arange(len(live.tokens), device=live.tokens.device)[:, None]
        return _Continuations(live.log_probabilities, torch.full_like(rows, live.forced), rows)
    # What is best of a sentence is among the best of each of its rows; a few more make up for what is never said.
    wanted = count + len(special.never_said)
    if isinstance(step, RankedStep) and not settings.renormalize:
        best = step.best_tokens(wanted)
    else:
        logits = _without(step.logits, special.never_said) if settings.renormalize else step.logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [R, V]
        best = top_entries(logits, min(wanted, logits.shape[-1]))
    return _continuations(live, best, count, special.never_said)


def _continuations(
    live: _LiveBeams, best: tuple[Tensor, Tensor, Tensor], count: int, never_said: tuple[int, ...] = OWN_IDS.never_said
) -> _Continuations:
    """The `count` most probable one-token extensions of all beams of each sentence, or fewer if fewer exist.

    best: the largest logits of each row, their tokens, and the log-sum-exp of the row.
    """
    sentences, width = live.log_probabilities.shape
    values, indices, log_sums = best  # [R, C + 2] twice, [R, 1]
    log_probabilities = values - log_sums
    for token in never_said:
        log_probabilities.masked_fill_(indices == token, -torch.inf)
    totals = (live.log_probabilities.view(-1, 1) + log_probabilities).view(sentences, -1)  # [N, K (C + 2)]
    chosen = totals.topk(min(count, totals.shape[1]))
    first_rows = torch.arange(sentences, device=values.device)[:, None] * width
    return _Continuations(
        log_probabilities=chosen.values,
        tokens=indices.view(sentences, -1).gather(1, chosen.indices),
        parents=first_rows + chosen.indices // indices.shape[1],
    )


def _without(logits: Tensor, never_said: tuple[int, ...]) -> Tensor:
    """Logits that give these tokens no probability."""
    return logits.index_fill(-1, torch.tensor(never_said, dtype=torch.int64, device=logits.device), -torch.inf)


class _Ending(NamedTuple):
    """A hypothesis that has ended: its last token and the row that it extends; earlier tokens are in the history."""

    score: float
    log_probability: float
    length: int  # with its last token
    row: int
    token: int
    finished: bool
    """Whether it ended with END; False if it was cut at the maximum length."""


class _SearchRecord:
    """The history of a search: every step, and every hypothesis that ended.

    Histories are not copied from step to step. Each step leaves its tokens, back pointers and weights; at the end the
    pointers of the few hypotheses that are returned are followed back.
    """

    def __init__(self, source_lengths: Tensor, settings: SearchSettings, longest: int | None, end: int) -> None:
        self._n_best, self._end = settings.n_best, end
        self._source_lengths: list[int] = source_lengths.tolist()
        limits = [math.ceil(length * settings.max_length_ratio) + EXTRA_LENGTH for length in self._source_lengths]
        limits = [limit if longest is None else min(limit, longest) for limit in limits]
        alpha, form = settings.length_penalty, settings.penalty_form
        penalties = [length_penalty(length, alpha, form) for length in range(max(limits) + 2)]
        self._limits = torch.tensor(limits, device=source_lengths.device)  # [N]
        self._penalties = torch.tensor(penalties, dtype=torch.float32, device=source_lengths.device)  # by length
        self._best_scores = self._penalties.new_full((len(limits), settings.n_best), -torch.inf)  # of what finished
        self._endings: list[list[_Ending]] = [[] for _ in limits]
        self._history: list[SearchStep] = []

    def advance(self, live: _LiveBeams, chosen: _Continuations, attention: StepWeights) -> _LiveBeams:
        """Record one step, and return the beams that continue."""
        self._history.append(SearchStep(live.tokens, live.parents, attention))
        length, limits = len(self._history), self._limits[live.sentences]
        ends, at_limit = chosen.tokens == self._end, limits <= length
        scores = chosen.log_probabilities.float() / self._penalties[length]
        self._record_endings(live, chosen, scores.masked_fill(~(ends | at_limit[:, None]), -torch.inf))
        finished = torch.cat([self._best_scores[live.sentences], scores.masked_fill(~ends, -torch.inf)], dim=1)
        self._best_scores[live.sentences] = finished.topk(self._n_best).values
        unended = chosen.log_probabilities.masked_fill(ends, -torch.inf)
        # A sentence stays while one of its beams can still enter its n best. Let p <= 0 be the log P of a beam. What it
        # becomes has p' <= p, as each token adds a logarithm <= 0, and a penalty of at most that of the longest length
        # allowed, as α >= 0. Therefore p' / penalty <= p / penalty <= p / penalty(limit). This holds in floating point
        # too, where addition and division are monotone. An empty place has p = -inf and cannot enter.
        bounds = unended.amax(dim=1).float() / self._penalties[limits]
        stays = ~at_limit & (bounds > self._best_scores[live.sentences, -1])
        return _LiveBeams(
            live.sentences[stays], unended[stays], chosen.tokens[stays].flatten(), chosen.parents[stays].flatten()
        )

    def _record_endings(self, live: _LiveBeams, chosen: _Continuations, scores: Tensor) -> None:
        """Record the continuations that end in this step: those with a score above -inf."""
        places = (scores > -torch.inf).nonzero(as_tuple=True)
        sentences = live.sentences[places[0]].tolist()
        columns = (scores, chosen.log_probabilities, chosen.parents, chosen.tokens)
        for sentence, *column in zip(sentences, *(values[places].tolist() for values in columns), strict=True):
            score, log_probability, row, token = column
            ending = _Ending(score, log_probability, len(self._history), row, token, token == self._end)
            self._endings[sentence].append(ending)

    def hypotheses(self) -> list[list[BeamHypothesis]]:
        """The n best of each sentence by score, finished ones before those that were cut."""
        best = [sorted(endings, key=self._rank)[: self._n_best] for endings in self._endings]
        if not all(best):
            raise RegardError(
                f"sentence {best.index([])} of the batch has no translation: the model gives no continuation a "
                "probability; its logits hold NaN or -inf, so look at its weights, which a diverged training ruins"
            )
        traced = iter(trace(self._history, [(ending.length, ending.row) for endings in best for ending in endings]))
        return [
            [self._hypothesis(ending, next(traced), length) for ending in endings]
            for endings, length in zip(best, self._source_lengths, strict=True)
        ]

    @staticmethod
    def _rank(ending: _Ending) -> tuple[float, ...]:
        """Less is better: finished ones first, then by score."""
        return (not ending.finished, -ending.score)

    def _hypothesis(self, ending: _Ending, path: TracedPath, source_length: int) -> BeamHypothesis:
        last, length = () if ending.finished else (ending.token,), ending.length
        weights = torch.zeros(length, 0, source_length) if path.weights is None else path.weights
        self_weights = torch.zeros(length, 0, length) if path.self_weights is None else path.self_weights
        return BeamHypothesis(
            ids=(*path.tokens[1:length], *last),
            score=ending.score,
            log_probability=ending.log_probability,
            weights=weights[:length, ..., :source_length].clone(),  # a view would keep the memory of all
            self_weights=self_weights[:length, ..., :length].clone(),
            finished=ending.finished,
        )


class _RefilledRecord(_SearchRecord):
    """The history of a search whose beams are filled again when a hypothesis ends, as in transformers."""

    def __init__(self, source_lengths: Tensor, settings: SearchSettings, longest: int | None, end: int) -> None:
        super().__init__(source_lengths, settings, longest, end)
        self._beam, self._forced, self._stops_early = settings.beam, int(settings.forced_end), settings.stop_early
        self._best_scores = self._penalties.new_full((len(source_lengths), settings.beam), -torch.inf)

    def advance(self, live: _LiveBeams, chosen: _Continuations, attention: StepWeights) -> _LiveBeams:
        """Record one step, and return the beams that continue: K of each sentence, where there are as many."""
        self._history.append(SearchStep(live.tokens, live.parents, attention))
        length, limits = len(self._history), self._limits[live.sentences]
        ends, at_limit = chosen.tokens == self._end, limits <= length
        lengths = length + self._forced * (at_limit[:, None] & ~ends)
        scores = chosen.log_probabilities.float() / self._penalties[lengths]
        stops = ends | at_limit[:, None]
        scores[:, self._beam :] = -torch.inf
        scores.masked_fill_(~stops, -torch.inf)
        self._record_endings(live, chosen, scores)
        finished = torch.cat([self._best_scores[live.sentences], scores], dim=1)
        self._best_scores[live.sentences] = finished.topk(self._beam).values
        unended = chosen.log_probabilities.masked_fill(stops, -torch.inf)
        kept = unended.topk(min(self._beam, unended.shape[1]))
        tokens, parents = (of.gather(1, kept.indices) for of in (chosen.tokens, chosen.parents))
        bounds = kept.values[:, 0].float() / self._penalties[length]
        worst = self._best_scores[live.sentences, -1]
        stays = ~at_limit & (worst == -torch.inf if self._stops_early else bounds > worst)
        return _LiveBeams(live.sentences[stays], kept.values[stays], tokens[stays].flatten(), parents[stays].flatten())

    @staticmethod
    def _rank(ending: _Ending) -> tuple[float, ...]:
        return (-ending.score,)
