"""Word alignment: weights between words, links by argmax and grow-diag, the Pharaoh format, the error rate.

A link is (source word, target word), counted from 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigurationError, CorpusError, ShapeError
from .dense_weights import checked_weights


def word_weights(weights: Tensor, words: Sequence[int | None], key_words: Sequence[int | None] | None = None) -> Tensor:
    """Weights between words (..., W, W') from those between tokens (..., M, N): sums over keys, means over queries.

    A row sums to 1 less the weight on tokens of no word; a word without tokens has zeros.

    Args:
        weights: between tokens, of any number of heads and layers.
        words: the number of each query's word, from 0; None or negative for tokens of no word, such as [CLS]. As from
            `word_ids()` of transformers.
        key_words: the same of the keys; without it those of the queries.

    Raises:
        ShapeError: not one number for each query and key.

    Source: Clark et al. 2019 (arXiv 1906.04341), section 4.1.

    >>> import torch
    >>> word_weights(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]), [0, 0, None])
    tensor([[0.6250]])
    """
    key_words = words if key_words is None else key_words
    weights = checked_weights(weights)
    if weights.shape[-2:] != (len(words), len(key_words)):
        raise ShapeError(
            f"weights have the shape {tuple(weights.shape)} for {len(words)} tokens of queries and {len(key_words)} of "
            "keys: each row and column needs the number of its word, or None"
        )
    rows, columns = (_membership(numbers).to(weights) for numbers in (words, key_words))
    return (rows / rows.sum(-1, keepdim=True).clamp(min=1)) @ weights @ columns.mT


def _membership(words: Sequence[int | None]) -> Tensor:
    """The membership matrix (words, tokens), bool."""
    numbers = torch.tensor([-1 if word is None else word for word in words], dtype=torch.int64)
    return torch.arange(int(numbers.max().clamp(min=-1)) + 1 if len(words) else 0)[:, None] == numbers


Link = tuple[int, int]
"""(source word, target word)."""

_ITEM = re.compile(r"(\d+)([-p?])(\d+)", re.ASCII)


@dataclass(frozen=True)
class SentenceLinks:
    """Gold links of one sentence pair: the sure ones, and all possible ones, sure ones included (Och and Ney)."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def parse_pharaoh(line: str, *, first: int = 0) -> SentenceLinks:
    """Parse one line of a Pharaoh file: "1-2" is a sure link, "1p2" or "1?2" a possible one.

    `first` is the number of the first word in the file: 0, or 1 as in many files of gold links. Returned links count
    from 0.

    Raises:
        CorpusError: an item that is no link.

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
    """Format links as one line of a Pharaoh file.

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
    """The links of one sentence pair by argmax: each target word to the source word with the largest weight.

    `weights` [T, S] are from target tokens to source tokens, and the numbers of their words as in `word_weights`. With
    `threshold` instead all pairs of words with at least this weight: a target word may then have several links, or
    none. A target word with zero weight on all source words has no link. Of equal weights the first; links are sorted.

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
        chosen &= chosen.cumsum(1) == 1  # the first of equal weights
    return sorted((source, target) for target, source in chosen.nonzero().tolist())


def mutual_links(
    weights: Tensor, source_words: Sequence[int], target_words: Sequence[int], *, grow: bool = False
) -> list[Link]:
    """The intersection of both directions: pairs with the largest weight of their row and of their column.

    With `grow` the grow-diag of Koehn et al.: links of one direction are added next to those found, horizontally,
    vertically or diagonally, as long as one of their two words has no link yet. Arguments and errors are those of
    `word_links`; links are sorted.

    Source: Koehn et al. 2005, Edinburgh System Description for the 2005 IWSLT Speech Translation Evaluation; with two
    models, one for each direction, where this reads one matrix by rows and by columns.

    >>> import torch
    >>> weights = torch.tensor([[0.75, 0.25], [0.625, 0.375]])
    >>> mutual_links(weights, [0, 1], [0, 1]), mutual_links(weights, [0, 1], [0, 1], grow=True)
    ([(0, 0)], [(0, 0), (0, 1), (1, 1)])
    """
    forth = set(word_links(weights, source_words, target_words))
    between = word_weights(weights, target_words, source_words)  # [T', S']
    sources, targets = list(range(between.shape[1])), list(range(between.shape[0]))
    back = {(source, target) for target, source in word_links(between.T, targets, sources)}
    found = forth & back
    return sorted(grow_diag(found, forth | back) if grow else found)


def grow_diag(found: Collection[Link], union: Collection[Link]) -> set[Link]:
    """Add to the links of both directions those of one, `union`, that stand beside one and link a word without any.

    Beside is horizontally, vertically or diagonally; until there are none.

    Source: Koehn et al. 2005, Edinburgh System Description for the 2005 IWSLT Speech Translation Evaluation.

    >>> sorted(grow_diag({(0, 0)}, {(0, 0), (1, 1), (0, 1), (3, 3)}))
    [(0, 0), (0, 1), (1, 1)]
    """
    found = set(found)
    sources, targets = ({link[side] for link in found} for side in (0, 1))
    before = -1
    while before < len(found):
        before = len(found)
        for source, target in sorted(found, key=lambda link: link[::-1]):
            for across, down in _STEPS:
                link = source + across, target + down
                if link in union and (link[0] not in sources or link[1] not in targets):
                    found.add(link)
                    sources.add(link[0])
                    targets.add(link[1])
    return found


def diagonal_links(source_words: int, target_words: int) -> list[Link]:
    """Link each target word j of T with the source word at the same share of the sentence, of S: j (S - 1) / (T - 1).

    Rounded to the nearest word, and to the even one of two. What links by position alone find is where every error rate
    should be compared with. Without source words there are no links.

    >>> diagonal_links(3, 5), diagonal_links(2, 1)
    ([(0, 0), (0, 1), (1, 2), (2, 3), (2, 4)], [(0, 0)])
    """
    steps = max(target_words - 1, 1)
    return [(round(row * (source_words - 1) / steps), row) for row in range(target_words)] if source_words else []


_STEPS = (0, -1), (-1, 0), (0, 1), (1, 0), (-1, -1), (1, -1), (-1, 1), (1, 1)


def alignment_error_rate(
    links: Sequence[Collection[Link]], sure: Sequence[Collection[Link]], possible: Sequence[Collection[Link]]
) -> float:
    """AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|), with the links A, the sure S and the possible P, S part of P.

    Each argument is a list over sentence pairs, which are counted together. 0 is perfect. Sure links count as possible,
    whether or not `possible` repeats them.

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
