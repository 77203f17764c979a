"""Word alignment learned from text alone: IBM model 1 and a hidden Markov model, of both directions at once.

Each direction is a model of a translation given its source: every target word is said by one source word or by none.
Training alternates between what said what, as probabilities, and the tables that make these most likely. Where there is
text enough the two directions learn from what they agree on.

Sources: Brown et al. 1993, The Mathematics of Statistical Machine Translation (IBM model 1); Vogel et al. 1996,
HMM-Based Word Alignment in Statistical Translation, with the empty word of Och and Ney 2003; Liang et al. 2006,
Alignment by Agreement; Riley and Gildea 2012 for the prior of the tables.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ConfigurationError, CorpusError
from regard.heads.word_alignment import Link, grow_diag

MODEL_1_ROUNDS, HMM_ROUNDS = 5, 5
PRIOR = 0.01
"""Of the Dirichlet prior of what a word says: below 1 few translations for each word are the likeliest."""
FARTHEST = 10
"""Jumps of more words than this are counted together."""
EMPTY_SHARE = 0.1
"""The share of words that no word says, before it has been counted."""
KEPT = 5.0
"""How much likelier a word is said by the same word, as names and numbers are, than by another, before any count."""
ENOUGH_PAIRS = 5_000
"""Pairs from which on both directions are trained together: fewer do not show what they should agree on."""
SIDE_STEP = 4
"""Sentences whose lengths are equal after rounding up to this are computed together."""
CELLS_AT_ONCE = 1 << 20


def align_words(
    sources: Sequence[Sequence[str]],
    targets: Sequence[Sequence[str]],
    *,
    stem: int | None = 4,
    together: bool | None = None,
    threshold: float = 0.05,
) -> list[list[Link]]:
    """The links of the words of each pair, by two models that are trained on these very pairs.

    With P(i | j) of the model that says the target, and P(j | i) of the one that says the source, words i and j are
    linked where P(i | j) P(j | i) > threshold. Where the directions are trained apart, links are the grow-diag of both.

    Args:
        sources: the words of each sentence.
        targets: the words of its translation.
        stem: words with equal first letters, so many, are one word for the models, of alphabets alone; None for whole
            words. Case, and punctuation at the ends of a word, never count.
        together: train on what both directions agree on, at each step; by default from 5,000 pairs on.
        threshold: of the product, in 0..1; a higher one gives fewer and safer links.

    A pair with an empty side has no links. Memory is about 30 bytes for each pair of words in a pair of sentences.

    Raises:
        CorpusError: sources and targets are not as many.
        ConfigurationError: stem below 1, or threshold out of 0..1.

    >>> sources = ["the house".split(), "the book".split(), "a book".split()]
    >>> targets = ["das Haus".split(), "das Buch".split(), "ein Buch".split()]
    >>> align_words(sources, targets)
    [[(0, 0), (1, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 1)]]
    """
    if len(sources) != len(targets):
        raise CorpusError(f"there are {len(sources):,} sources and {len(targets):,} targets: each needs the other")
    if stem is not None and stem < 1:
        raise ConfigurationError(f"stem is {stem}; it needs to be 1 or more letters, or None for whole words")
    if not 0 <= threshold <= 1:
        raise ConfigurationError(f"threshold is {threshold}; it needs to be in 0..1, as products of probabilities are")
    together = len(sources) >= ENOUGH_PAIRS if together is None else together
    text = KindPairs.of(sources, targets, stem)
    models = _trained(text, together)
    links: list[list[Link]] = [[] for _ in sources]
    for batch in text.batches:
        forth, back = (model.posteriors(batch.seen_from(side)).words for side, model in enumerate(models))
        found = _product_links(forth, back.mT, threshold) if together else _grown_links(forth, back.mT, batch)
        for row, some in zip(batch.rows.tolist(), found, strict=True):
            links[row] = some
    return links


def _trained(text: KindPairs, together: bool) -> tuple[Direction, Direction]:
    """Both directions after all rounds: model 1 first, whose words do not know where their neighbours were said."""
    models = Direction(text.sides[0]), Direction(text.sides[1])
    for number in range(MODEL_1_ROUNDS + HMM_ROUNDS):
        counts = tuple(Counts.none(model) for model in models)
        for batch in text.batches:
            seen = [batch.seen_from(side) for side in (0, 1)]
            found = [model.posteriors(view) for model, view in zip(models, seen, strict=True)]
            if together:
                agreed = found[0].words * found[1].words.mT
                found = [found[0].agreeing(agreed), found[1].agreeing(agreed.mT)]
            for count, view, posteriors in zip(counts, seen, found, strict=True):
                count.add(view, posteriors)
        for model, count in zip(models, counts, strict=True):
            model.learn(count, jumps=number + 1 >= MODEL_1_ROUNDS)
    return models


_INNER = re.compile(r"^\W+|\W+$")
_ELISION = re.compile(r"^\w{1,2}['’](?=\w{3})")
_WHOLE = re.compile(r"[\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
"""Scripts whose words have few signs: Hangul, kana and Chinese characters."""


def kind_of(word: str, stem: int | None) -> str:
    """What words that are one for the models have in common.

    >>> kind_of("L'Animal,", 4), kind_of("«", 4), kind_of("한국어를", 4)
    ('anim', '«', '한국어를')
    """
    kind = word.casefold()
    kind = _ELISION.sub("", _INNER.sub("", kind)) or kind
    return kind if stem is None or _WHOLE.search(kind) else kind[:stem]


class Side(NamedTuple):
    """What a direction needs to know of the text: the pairs of kinds that stand in one pair of sentences."""

    sayers: Tensor
    """[cells], the kind of word that says."""
    said: Tensor
    """[cells], the kind of word that is said."""
    kinds: int
    """How many kinds the text has, in both languages."""


class View(NamedTuple):
    """Pairs of nearly equal lengths from one direction: T words are said by S words."""

    cells: Tensor
    """[n, T, S], the number of the pair of kinds; the last cell for padding."""
    said: Tensor
    """[n, T], kinds."""
    there: Tensor
    """[n, T], False for padding."""
    sayers_there: Tensor
    """[n, S]."""


class PairBatch(NamedTuple):
    """Pairs of nearly equal lengths, padded."""

    rows: Tensor
    cells: Tensor
    """[n, T, S]."""
    sources: Tensor
    targets: Tensor
    """[n, S] and [n, T], kinds; -1 for padding."""

    def seen_from(self, side: int) -> View:
        """The pairs from direction 0, whose targets are said, or 1, whose sources are."""
        said, sayers = (self.targets, self.sources) if side == 0 else (self.sources, self.targets)
        return View(self.cells if side == 0 else self.cells.mT, said.clamp(min=0), said >= 0, sayers >= 0)


@dataclass(frozen=True)
class KindPairs:
    """The pairs of a text as numbers of kinds, in batches."""

    batches: list[PairBatch]
    sides: tuple[Side, Side]

    @classmethod
    def of(cls, sources: Sequence[Sequence[str]], targets: Sequence[Sequence[str]], stem: int | None) -> KindPairs:
        """Number the kinds of a text, and each pair of kinds that stand in one pair of sentences."""
        numbers: dict[str, int] = {}
        source_kinds, target_kinds = (_numbered(side, stem, numbers) for side in (sources, targets))
        batches = []
        for rows in _rows_by_length(source_kinds, target_kinds):
            s, t = (_padded(side[row] for row in rows) for side in (source_kinds, target_kinds))
            keys = torch.where((t >= 0)[:, :, None] & (s >= 0)[:, None], s[:, None] * len(numbers) + t[:, :, None], -1)
            batches.append(PairBatch(torch.tensor(rows), keys, s, t))
        known = torch.cat([batch.cells.unique() for batch in batches]).unique() if batches else torch.zeros(0).long()
        known = known[known >= 0]
        numbered = [
            batch._replace(cells=torch.where(batch.cells < 0, len(known), torch.searchsorted(known, batch.cells)).int())
            for batch in batches
        ]
        s, t = known // max(1, len(numbers)), known % max(1, len(numbers))
        return cls(numbered, (Side(s, t, len(numbers)), Side(t, s, len(numbers))))


def _numbered(sentences: Sequence[Sequence[str]], stem: int | None, numbers: dict[str, int]) -> list[list[int]]:
    """The kinds of the words of each sentence; `numbers` has those of all languages."""
    kinds: dict[str, int] = {}
    for word in itertools.chain.from_iterable(sentences):
        if word not in kinds:
            kinds[word] = numbers.setdefault(kind_of(word, stem), len(numbers))
    return [[kinds[word] for word in sentence] for sentence in sentences]


def _rows_by_length(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Pairs of nearly equal lengths, as many as are computed at once; those with an empty side in none."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source and target:
            groups[-(-len(source) // SIDE_STEP), -(-len(target) // SIDE_STEP)].append(row)
    for (width, height), rows in sorted(groups.items()):
        some = max(1, CELLS_AT_ONCE // (width * height * SIDE_STEP**2))
        yield from (rows[start : start + some] for start in range(0, len(rows), some))


def _padded(sentences: Iterable[Sequence[int]]) -> Tensor:
    """One row for each sentence, -1 after its end."""
    rows = [torch.tensor(sentence) for sentence in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


class Posteriors(NamedTuple):
    """What said what, as probabilities."""

    words: Tensor
    """[n, T, S]: word i has said word j."""
    empty: Tensor
    """[n, T]: no word has."""
    jumps: Tensor
    """[2 FARTHEST + 1]: how often the next word that said was so many words farther."""
    starts: Tensor
    """[FARTHEST + 1]: how often word i said the first one."""

    def agreeing(self, words: Tensor) -> Posteriors:
        """The same with what both directions agree on."""
        return self._replace(words=words)


@dataclass
class Counts:
    """Expected counts of a round, over all batches."""

    cells: Tensor
    empty: Tensor
    jumps: Tensor = field(default_factory=lambda: torch.full((2 * FARTHEST + 1,), 0.5, dtype=torch.float64))
    starts: Tensor = field(default_factory=lambda: torch.full((FARTHEST + 1,), 0.5, dtype=torch.float64))
    without: float = 0.0
    words: float = 0.0

    @classmethod
    def none(cls, model: Direction) -> Counts:
        """No counts yet."""
        return cls(
            torch.zeros_like(model.table, dtype=torch.float64), torch.zeros_like(model.empty, dtype=torch.float64)
        )

    def add(self, view: View, found: Posteriors) -> None:
        """Add those of a batch."""
        there = view.there.double()
        self.cells.index_add_(0, view.cells.reshape(-1), (found.words * view.there[..., None]).reshape(-1).double())
        self.empty.index_add_(0, view.said.reshape(-1), (found.empty * there).reshape(-1))
        self.jumps += found.jumps
        self.starts += found.starts
        self.without += float((found.empty * there).sum())
        self.words += float(there.sum())


class Direction:
    """The model of one direction: what each kind of word says, and how far the next word that says is."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._pairs = torch.bincount(side.sayers, minlength=side.kinds)
        share = torch.where(side.sayers == side.said, KEPT, 1.0)
        self.table = _with_padding(share / self._sums(share)[side.sayers])
        self._said_kinds = torch.zeros(side.kinds).index_fill_(0, side.said.unique(), 1.0)
        self.empty = self._said_kinds / self._said_kinds.sum().clamp(min=1)
        self.empty_share = EMPTY_SHARE
        self.jumps: Tensor | None = None
        self.starts = torch.ones(FARTHEST + 1)

    def _sums(self, cells: Tensor) -> Tensor:
        """The sum over all that a kind says."""
        return cells.new_zeros(self._side.kinds).index_add_(0, self._side.sayers, cells)

    def posteriors(self, view: View) -> Posteriors:
        """What said what in a batch: by model 1 before jumps have been learned."""
        said = self.table[view.cells] * (1 - self.empty_share)
        empty = self.empty[view.said] * self.empty_share
        if self.jumps is None:
            said = said / view.sayers_there.sum(1)[:, None, None]
            total = (said.sum(-1) + empty).clamp(min=torch.finfo(said.dtype).tiny)  # of padding it may be 0
            none = torch.zeros((), dtype=torch.float64)
            return Posteriors(said / total[..., None], empty / total, none, none)
        return _forward_backward(said, empty, view, self.jumps, self.starts)

    def learn(self, counts: Counts, *, jumps: bool) -> None:
        """Take the tables that make the counts likeliest, under a prior that wants few translations of a word."""
        cells = counts.cells[:-1]
        totals = self._sums(cells) + PRIOR * self._pairs
        self.table = _with_padding(_expected(cells, totals[self._side.sayers]))
        self.empty = _expected(counts.empty, counts.empty.sum() + PRIOR * self._said_kinds.sum())
        if jumps:
            self.jumps = _first_jumps() if self.jumps is None else counts.jumps.float()
            self.starts = counts.starts.float()
            self.empty_share = min(max(counts.without / max(counts.words, 1.0), 0.02), 0.3)


def _first_jumps() -> Tensor:
    """Before any has been counted: to the next word is likeliest."""
    return torch.exp(-(torch.arange(-FARTHEST, FARTHEST + 1) - 1).abs() / 2)


def _with_padding(table: Tensor) -> Tensor:
    """The table and its last cell, that of padding, which says nothing."""
    return torch.cat([table, table.new_zeros(1)])


def _expected(counts: Tensor, totals: Tensor) -> Tensor:
    """E[log p] of a Dirichlet distribution with these counts, as probabilities."""
    return torch.exp(torch.digamma(counts + PRIOR) - torch.digamma(totals)).clamp(min=1e-12).float()


def _forward_backward(said: Tensor, empty: Tensor, view: View, jumps: Tensor, starts: Tensor) -> Posteriors:
    """The posteriors of a hidden Markov model whose state is the word that said last, and whether it did so now.

    Shapes: said [n, T, S] and empty [n, T], the probabilities to say each word, the padding's 0.
    """
    n, length, width = said.shape
    place = torch.arange(width)
    distance = (place[None, :] - place[:, None]).clamp(-FARTHEST, FARTHEST) + FARTHEST
    jump, there = jumps[distance], view.sayers_there.float()
    leaving = there @ jump.mT  # [n, S], the sum of all jumps from a word to those that are there
    start = starts[place.clamp(max=FARTHEST)] * there
    start = start / start.sum(1, keepdim=True)

    spoke, silent, scales = [], [], []
    for step in range(length):
        if step == 0:
            now, kept = start * said[:, 0], start * empty[:, :1]
        else:
            before = spoke[-1] + silent[-1]
            now, kept = (before / leaving) @ jump * said[:, step], before * empty[:, step, None]
        scale = (now + kept).sum(1, keepdim=True).clamp(min=torch.finfo(said.dtype).tiny)
        spoke.append(now / scale)
        silent.append(kept / scale)
        scales.append(scale)

    after = torch.ones(n, width)
    words, without = torch.empty_like(said), torch.empty_like(empty)
    counted = torch.zeros(width, width)
    for step in reversed(range(length)):
        words[:, step], without[:, step] = spoke[step] * after, (silent[step] * after).sum(1)
        if step == 0:
            break
        goes_on = view.there[:, step, None]
        arriving = said[:, step] * after / scales[step] * goes_on
        leaving_now = (spoke[step - 1] + silent[step - 1]) / leaving
        counted += leaving_now.mT @ arriving
        after = torch.where(
            goes_on, arriving @ jump.mT / leaving + empty[:, step, None] * after / scales[step], torch.ones(())
        )
    return Posteriors(
        words,
        without,
        torch.zeros(2 * FARTHEST + 1, dtype=torch.float64).index_add_(
            0, distance.reshape(-1), (counted * jump).reshape(-1).double()
        ),
        torch.zeros(FARTHEST + 1, dtype=torch.float64).index_add_(
            0, place.clamp(max=FARTHEST), words[:, 0].sum(0).double()
        ),
    )


def _product_links(forth: Tensor, back: Tensor, threshold: float) -> list[list[Link]]:
    """The pairs of words on which both directions agree."""
    found: list[list[Link]] = [[] for _ in forth]
    for row, target, source in (forth * back > threshold).nonzero().tolist():
        found[row].append((source, target))
    return [sorted(links) for links in found]


def _grown_links(forth: Tensor, back: Tensor, batch: PairBatch) -> list[list[Link]]:
    """The likeliest sayer of each word, from both directions, joined by grow-diag."""
    one = (forth == forth.amax(2, keepdim=True)) & (forth > 1 - forth.sum(2, keepdim=True))
    other = (back == back.amax(1, keepdim=True)) & (back > 1 - back.sum(1, keepdim=True))
    real = (batch.targets >= 0)[:, :, None] & (batch.sources >= 0)[:, None]
    found = []
    for a, b in zip(one & real, other & real, strict=True):
        first, second = ({(s, t) for t, s in side.nonzero().tolist()} for side in (a, b))
        found.append(sorted(grow_diag(first & second, first | second)))
    return found
