"""Links between the words of a sentence and its translation, those that people made, and how well the two agree.

As text they are in the Pharaoh format, "0-0 1-2": source word and target word, counted from 0.

From weights between the pieces of a tokenizer to weights between words.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError, CorpusError, ShapeError
from .apply_lenses import checked


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


Link = tuple[int, int]
"""(source word, target word)."""

_ITEM = re.compile(r"(\d+)([-p?])(\d+)", re.ASCII)


@dataclass(frozen=True)
class SentenceLinks:
    """The links of one sentence pair. What is sure is possible too, as Och and Ney have it."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def parse_pharaoh(line: str, *, first: int = 0) -> SentenceLinks:
    """The links in one line of a Pharaoh file: "1-2" is a sure link, "1p2" or "1?2" a possible one.

    `first` is the number that the line gives to the first word: 0, or 1 as in many files of gold links. The links that
    are returned count from 0.

    Raises:
        CorpusError: something in it is no link.

    >>> links = parse_pharaoh("0-0 2?3")
    >>> sorted(links.sure), sorted(links.possible)
    ([(0, 0)], [(0, 0), (2, 3)])
    """
    sure, possible = set(), set()
    for item in line.split():
        match = _ITEM.fullmatch(item)
        if match is None:
            raise CorpusError(f"{item[:80]!r} is no link; it needs to be two word numbers as in 0-1, 0p1 or 0?1")
        source, kind, target = int(match[1]) - first, match[2], int(match[3]) - first
        if min(source, target) < 0:
            raise CorpusError(f"{item[:80]!r} has a word number below {first}, the first one; give first=0")
        possible.add((source, target))
        if kind == "-":
            sure.add((source, target))
    return SentenceLinks(frozenset(sure), frozenset(possible))


def format_pharaoh(links: Iterable[Link]) -> str:
    """The links as one line of a Pharaoh file.

    >>> format_pharaoh([(0, 0), (1, 2)])
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def word_links(
    weights: Tensor,
    source_words: Sequence[int],
    target_words: Sequence[int],
    *,
    threshold: float | None = None,
) -> list[Link]:
    """The links of one sentence pair: for each target word the source word that it looks at most.

    `weights` [T, S] are those of target pieces at source pieces; the numbers of their words are as `word_weights` takes
    them. With `threshold`, instead every pair of words whose weight is at least that; a target word may then have
    several links, or none. A target word that gives no source word any weight has no link. The links are sorted.

    Raises:
        ShapeError: the weights are not [T, S].
        ConfigurationError: `threshold` is not above 0 and at most 1.

    >>> import torch
    >>> word_links(torch.tensor([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1]]), [0, 1, 1], [0, 1])
    [(0, 1), (1, 0)]
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ConfigurationError(f"threshold is {threshold}; it needs to be above 0 and at most 1, as weights are")
    between = word_weights(weights, target_words, source_words)  # [T', S']
    if not between.numel():
        return []
    chosen = between == between.amax(1, keepdim=True) if threshold is None else between >= threshold
    chosen &= between > 0
    if threshold is None:
        chosen &= chosen.cumsum(1) == 1  # of equals the first
    return sorted((source, target) for target, source in chosen.nonzero().tolist())


def mutual_links(
    weights: Tensor, source_words: Sequence[int], target_words: Sequence[int], *, grow: bool = False
) -> list[Link]:
    """The links on which both sides agree: each word gives the other the greatest weight of its row and its column.

    With `grow` there are more, the grow-diag of Koehn et al.: links that only one side has, beside one that is there, a
    step along or across or both, for as long as one of their two words has no link yet. Arguments and errors are those
    of `word_links`; the links are sorted.

    Source: Koehn et al. 2005, Edinburgh System Description for the 2005 IWSLT Speech Translation Evaluation; theirs are
    of two models, one for each direction, and here of the two readings of one.

    >>> import torch
    >>> weights = torch.tensor([[0.75, 0.25], [0.625, 0.375]])
    >>> mutual_links(weights, [0, 1], [0, 1]), mutual_links(weights, [0, 1], [0, 1], grow=True)
    ([(0, 0)], [(0, 0), (0, 1), (1, 1)])
    """
    forth = set(word_links(weights, source_words, target_words))
    between = word_weights(weights, target_words, source_words)  # [T', S']
    every = list(range(between.shape[1])), list(range(between.shape[0]))
    back = {(source, target) for target, source in word_links(between.T, every[1], every[0])}
    found = forth & back
    return sorted(_grown(found, forth | back) if grow else found)


def _grown(found: set[Link], every: set[Link]) -> set[Link]:
    """Links of `every` beside those found, as long as there are such with a word that has none."""
    found = set(found)
    sources, targets = ({link[side] for link in found} for side in (0, 1))
    before = -1
    while before < len(found):
        before = len(found)
        for source, target in sorted(found, key=lambda link: link[::-1]):
            for across, down in _STEPS:
                link = source + across, target + down
                if link in every and (link[0] not in sources or link[1] not in targets):
                    found.add(link)
                    sources.add(link[0])
                    targets.add(link[1])
    return found


_STEPS = (0, -1), (-1, 0), (0, 1), (1, 0), (-1, -1), (1, -1), (-1, 1), (1, 1)


def alignment_error_rate(
    links: Sequence[Collection[Link]], sure: Sequence[Collection[Link]], possible: Sequence[Collection[Link]]
) -> float:
    """AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), with the links A, the sure S and the possible P, S part of P.

    Each argument has the links of one sentence pair after another; they are counted over all pairs together. 0 is
    perfect. Sure links count as possible, whether or not `possible` repeats them.

    Source: Och and Ney 2003, A Systematic Comparison of Various Statistical Alignment Models (on evaluation).

    Raises:
        CorpusError: the arguments have different numbers of sentence pairs, or there is no link to count.

    >>> alignment_error_rate([[(0, 0), (1, 1)]], sure=[[(0, 0)]], possible=[[(0, 0), (1, 1), (1, 2)]])
    0.0
    """
    if not len(links) == len(sure) == len(possible):
        raise CorpusError(
            f"links has {len(links):,} sentence pairs, sure has {len(sure):,} and possible has {len(possible):,}; "
            "they need to be of the same sentence pairs"
        )
    found, total = 0, 0
    for a, s, p in zip(map(set, links), map(set, sure), map(set, possible), strict=True):
        found += len(a & s) + len(a & (p | s))
        total += len(a) + len(s)
    if not total:
        raise CorpusError("there is no alignment error rate: neither links nor sure has any link")
    return 1 - found / total
