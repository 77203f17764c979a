"""Attention weights as links between words, in the Pharaoh format "0-0 1-2": source-target, counted from 0."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.errors import ConfigurationError, CorpusError, ShapeError
from regard.translation.corpus import read_lines

Link = tuple[int, int]
"""(source word, target word)."""

_ITEM = re.compile(r"(\d+)([-p])(\d+)", re.ASCII)


@dataclass(frozen=True)
class SentenceLinks:
    """The links of one sentence pair. What is sure is possible too, as Och and Ney have it."""

    sure: frozenset[Link]
    possible: frozenset[Link]


def one_map(weights: Tensor, layer: int | None = None, head: int | None = None) -> Tensor:
    """Weights [T, layers, heads, S] as one map [T, S]: of a layer and head, or the mean over those that are not chosen.

    Layers and heads count from 0. Weights that are [T, S] already stay as they are. By default it is the mean over all
    heads of all layers: a distribution that no single head need have, and that needs no choice.

    Raises:
        ConfigurationError: there is no such layer or head, or nothing was observed.

    >>> weights = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])  # one token, one layer, two heads, two source tokens
    >>> one_map(weights), one_map(weights, head=1)
    (tensor([[0.5000, 0.5000]]), tensor([[0., 1.]]))
    """
    if weights.ndim == 2 and layer is None and head is None:
        return weights
    if 0 in weights.shape[1:-1]:
        raise ConfigurationError("there are no weights to show: the translation was made with observe=False")
    sizes = (
        {"layer": 0, "head": 0} if weights.ndim == 2 else dict(zip(("layer", "head"), weights.shape[1:3], strict=True))
    )
    for (name, size), chosen in zip(sizes.items(), (layer, head), strict=True):
        if chosen is not None and not 0 <= chosen < size:
            has = f"has {size} {name}s, 0 to {size - 1}" if size else f"has one map of weights and no {name}s"
            raise ConfigurationError(f"there is no {name} {chosen}: the model {has}")
    weights = weights.mean(1) if layer is None else weights[:, layer]  # [T, heads, S]
    return weights.mean(1) if head is None else weights[:, head]


def word_weights(weights: Tensor, source_words: Sequence[int], target_words: Sequence[int]) -> Tensor:
    """Weights between pieces as weights [target words, source words]: sums over the source, means over the target.

    `weights` is [T, S]; `source_words` gives for each of the S source pieces the number of its word, `target_words`
    for each of the T target pieces, as `Vocabulary.words` does. A negative number means no word: PAD, BEGIN, END.
    A target word's row sums to 1 less what its pieces give to such tokens. A word without pieces has only zeros.

    Raises:
        ShapeError: the weights are not [T, S].

    >>> word_weights(torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.5, 0.5]]), [0, 0, -1], [0, 0])
    tensor([[0.6250]])
    """
    if weights.shape != (len(target_words), len(source_words)):
        raise ShapeError(
            f"weights is {list(weights.shape)}, but there are {len(target_words)} target pieces and "
            f"{len(source_words)} source pieces; it needs to be [target pieces, source pieces], END included or left "
            "out on both"
        )
    source = _membership(source_words).to(weights)  # [S', S]
    target = _membership(target_words).to(weights)  # [T', T]
    means = target / target.sum(1, keepdim=True).clamp(min=1)
    return means @ weights @ source.T


def word_links(
    weights: Tensor,
    source_words: Sequence[int],
    target_words: Sequence[int],
    *,
    threshold: float | None = None,
) -> list[Link]:
    """The links of one sentence pair: for each target word the source word that it looks at most.

    With `threshold`, instead every pair of words whose weight is at least that; a target word may then have several
    links, or none. A target word that gives no source word any weight has no link. The arguments are those of
    `word_weights`; the links are sorted.

    Raises:
        ShapeError: the weights are not [T, S].
        ConfigurationError: `threshold` is not above 0 and at most 1.

    >>> word_links(torch.tensor([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1]]), [0, 1, 1], [0, 1])
    [(0, 1), (1, 0)]
    """
    if threshold is not None and not 0 < threshold <= 1:
        raise ConfigurationError(f"threshold is {threshold}; it needs to be above 0 and at most 1, as weights are")
    between = word_weights(weights, source_words, target_words)  # [T', S']
    if not between.numel():
        return []
    chosen = between == between.amax(1, keepdim=True) if threshold is None else between >= threshold
    chosen &= between > 0
    if threshold is None:
        chosen &= chosen.cumsum(1) == 1  # of equals the first
    return sorted((source, target) for target, source in chosen.nonzero().tolist())


def format_pharaoh(links: Iterable[Link]) -> str:
    """The links as one line of a Pharaoh file.

    >>> format_pharaoh([(0, 0), (1, 2)])
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in links)


def read_pharaoh(path: str | Path, *, first: int = 0) -> list[SentenceLinks]:
    """The links of a Pharaoh file, one line a sentence pair: "1-2" is a sure link, "1p2" a possible one.

    `first` is the number that the file gives to the first word: 0, or 1 as in many files of gold links. The links that
    are returned count from 0. An empty line is a pair without links. The file may be gzip.

    Raises:
        CorpusError: the file cannot be read, or something in it is no link.
    """
    return [_read_line(line, first, f"{path}, line {number}") for number, line in enumerate(read_lines(path), start=1)]


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


def _membership(words: Sequence[int]) -> Tensor:
    """[words, pieces]: 1 where the piece belongs to the word."""
    numbers = torch.tensor(words, dtype=torch.int64)
    return torch.arange(max([-1, *words]) + 1)[:, None] == numbers


def _read_line(line: str, first: int, place: str) -> SentenceLinks:
    sure, possible = set(), set()
    for item in line.split():
        match = _ITEM.fullmatch(item)
        if match is None:
            raise CorpusError(f"{place}: {item!r} is no link; it needs to be two word numbers as in 0-1 or 0p1")
        source, kind, target = int(match[1]) - first, match[2], int(match[3]) - first
        if min(source, target) < 0:
            raise CorpusError(f"{place}: {item!r} has a word number below {first}, the first one; give first=0")
        possible.add((source, target))
        if kind == "-":
            sure.add((source, target))
    return SentenceLinks(frozenset(sure), frozenset(possible))
