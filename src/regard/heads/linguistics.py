"""Accuracy of heads on syntactic dependencies and on antecedents, against baselines by position alone.

Also a reader of CoNLL-U, the format of annotated sentences.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ConfigurationError, CorpusError, ShapeError
from .dense_weights import checked_weights
from .roles import checked_same_heads

COLUMNS = 10
ROOT = -1


@dataclass(frozen=True)
class Sentence:
    """A parsed sentence: words, and for each the index of its head, -1 for the root, and the relation to it.

    The rest is empty where it is not annotated. For each word: the lemma (in Korean treebanks its morphemes, joined by
    +), the universal and the treebank's own part of speech, the features such as Polarity=Neg, and whether white space
    follows. identifier: the sentence's `sent_id`.
    """

    words: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]
    lemmas: tuple[str, ...] = ()
    upos: tuple[str, ...] = ()
    xpos: tuple[str, ...] = ()
    features: tuple[frozenset[str], ...] = ()
    spaces: tuple[bool, ...] = ()
    identifier: str = ""

    @property
    def text(self) -> str:
        """The words as running text: white space where `spaces` has it, and between all words without.

        >>> Sentence(("No", "!"), (-1, 0), ("root", "punct"), spaces=(False, False)).text
        'No!'
        """
        spaces = self.spaces or (True,) * len(self.words)
        return "".join(word + " " * space for word, space in zip(self.words, spaces, strict=True)).rstrip(" ")


def read_conllu(path: str | Path) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file, plain or gzip. See `parse_conllu`.

    Raises:
        CorpusError: the file cannot be read, or is no CoNLL-U.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {path}: {error}; it needs CoNLL-U in UTF-8, plain or gzip") from error
    return list(parse_conllu(text.split("\n"), name=str(path)))


def parse_conllu(lines: Iterable[str], *, name: str = "the text") -> Iterator[Sentence]:
    r"""Parse lines of CoNLL-U: ten columns between tabs, an empty line after each sentence.

    The words are the syntactic ones: a multiword token (1-2) says only where white space is, which is nowhere inside
    it. Empty nodes (8.1) and comments other than `sent_id` are skipped.

    Raises:
        CorpusError: a line without ten columns, a word out of order, a head that does not exist.

    Source: the format's description, https://universaldependencies.org/format.html.

    >>> lines = ["1\tShe\tshe\tPRON\t_\t_\t2\tnsubj\t_\t_", "2\tsings\tsing\tVERB\t_\t_\t0\troot\t_\t_", ""]
    >>> sentence = next(parse_conllu(lines))
    >>> sentence.words, sentence.heads, sentence.relations, sentence.upos
    (('She', 'sings'), (1, -1), ('nsubj', 'root'), ('PRON', 'VERB'))
    """
    rows: list[list[str]] = []
    place, identifier = name, ""
    glued: set[int] = set()
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip("\r\n")
        if not line.strip():
            if rows:
                yield _sentence(rows, glued, identifier, place)
            rows, glued, identifier = [], set(), ""
            continue
        if line.startswith("#"):
            key, _, value = line.removeprefix("#").partition("=")
            identifier = value.strip() if key.strip() == "sent_id" else identifier
            continue
        place = f"{name}, line {number}"
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise CorpusError(f"{place}: {len(columns)} columns between tabs; CoNLL-U needs {COLUMNS}")
        if "." in columns[0]:
            continue
        if "-" in columns[0]:
            glued.update(_inside_multiword(columns))
            continue
        if columns[0] != str(len(rows) + 1):
            raise CorpusError(f"{place}: the word has the number {columns[0]!r}; it needs {len(rows) + 1}")
        if not columns[6].isdecimal():
            raise CorpusError(f"{place}: the head is {columns[6]!r}; it needs the number of a word, or 0 for the root")
        rows.append(columns)
    if rows:
        yield _sentence(rows, glued, identifier, place)


def _inside_multiword(columns: list[str]) -> list[int]:
    """The indices of the words of a multiword token that no white space follows."""
    first, _, last = columns[0].partition("-")
    if not (first.isdecimal() and last.isdecimal()):
        return []
    end = int(last) if "SpaceAfter=No" in columns[9].split("|") else int(last) - 1
    return list(range(int(first) - 1, end))


def _sentence(rows: list[list[str]], glued: set[int], identifier: str, place: str) -> Sentence:
    heads = tuple(int(columns[6]) - 1 for columns in rows)
    wrong = [head + 1 for head in heads if head >= len(rows)]
    if wrong:
        raise CorpusError(f"{place}, the end of a sentence: a word has the head {wrong[0]}, and there are {len(rows)}")
    words, lemmas, upos, xpos, features, relations, miscellany = (
        tuple(columns[field] for columns in rows) for field in (1, 2, 3, 4, 5, 7, 9)
    )
    spaces = (index not in glued and "SpaceAfter=No" not in misc.split("|") for index, misc in enumerate(miscellany))
    split = (frozenset() if each == "_" else frozenset(each.split("|")) for each in features)
    return Sentence(words, heads, relations, lemmas, upos, xpos, tuple(split), tuple(spaces), identifier)


Direction = Literal["dependent to head", "head to dependent"]
Key = tuple[str, Direction]


@dataclass(frozen=True)
class RelationAccuracy:
    """The accuracy of the best head for a relation in one direction, and that of the best fixed offset.

    head: its index along the leading axes of the weights, such as (layer, head). accuracy: the share of n words whose
    most attended other word is right. baseline: the accuracy of always choosing the word at `offset`.
    """

    relation: str
    direction: Direction
    head: tuple[int, ...]
    accuracy: float
    n: int
    offset: int
    baseline: float

    def __str__(self) -> str:
        head = "-".join(map(str, self.head))
        return (
            f"{self.relation:<14} {self.direction:<17} {head:>6} {self.accuracy:>8.1%} {self.offset:>+7d} "
            f"{self.baseline:>8.1%} {self.accuracy - self.baseline:>+7.1%} {self.n:>6,}"
        )


class SyntaxTable(tuple[RelationAccuracy, ...]):
    """The rows of `SyntaxEvidence.table`, printed as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        title = f"{'relation':<14} {'direction':<17} {'head':>6} {'accuracy':>8} {'offset':>7} {'baseline':>8} "
        return "\n".join([title + f"{'gain':>7} {'n':>6}", *map(str, self)])


@dataclass(frozen=True, eq=False)
class SyntaxEvidence:
    """Counts for each relation and direction: words, words that each head gets right, and each offset gets right.

    Evidence of several sentences adds up: `first + second`, or `SyntaxEvidence.total(parts)`.
    """

    shape: tuple[int, ...]
    n: Mapping[Key, int]
    right: Mapping[Key, Tensor]
    offsets: Mapping[Key, Counter[int]]

    @classmethod
    def from_weights(cls, between: Tensor, sentence: Sentence) -> SyntaxEvidence:
        """Counts for one sentence, from the weights between its words, (..., W, W), as `word_weights` returns them.

        A word predicts the other word with the largest weight, the first of equals. "dependent to head": each word that
        has a head counts, right if it predicts the head. "head to dependent": each word with dependents of the relation
        counts, right if it predicts one of them.

        Raises:
            ShapeError: not one row and column for each word.

        Source: Clark et al. 2019 (arXiv 1906.04341), section 4.2.

        >>> import torch
        >>> sentence = Sentence(("She", "sings", "songs"), (1, -1, 1), ("nsubj", "root", "obj"))
        >>> back = torch.tensor([[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
        >>> print(SyntaxEvidence.from_weights(back, sentence).table())
        relation       direction           head accuracy  offset baseline    gain      n
        nsubj          dependent to head      0   100.0%      +1   100.0%   +0.0%      1
        nsubj          head to dependent      0   100.0%      -1   100.0%   +0.0%      1
        obj            dependent to head      0   100.0%      -1   100.0%   +0.0%      1
        obj            head to dependent      0     0.0%      +1   100.0% -100.0%      1
        """
        between, words = checked_weights(between), len(sentence.words)
        if between.shape[-2:] != (words, words):
            raise ShapeError(
                f"the weights between words have the shape {tuple(between.shape)} for {words} words; they need (..., "
                f"{words}, {words}), as word_weights(weights, word_numbers) gives them"
            )
        chosen = _predictions(between.reshape(-1, words, words))
        n: Counter[Key] = Counter()
        right: dict[Key, Tensor] = {}
        offsets: dict[Key, Counter[int]] = {}
        for key, row, answers in _labelled_rows(sentence):
            n[key] += 1
            found = torch.isin(chosen[:, row], torch.tensor(answers))
            right[key] = right[key] + found if key in right else found.long()
            offsets.setdefault(key, Counter()).update(answer - row for answer in answers)
        return cls(tuple(between.shape[:-2]), n, right, offsets)

    def __add__(self, other: SyntaxEvidence) -> SyntaxEvidence:
        return SyntaxEvidence.total([self, other])

    @staticmethod
    def total(parts: Iterable[SyntaxEvidence]) -> SyntaxEvidence:
        """The sum of several parts.

        Raises:
            ConfigurationError: no parts.
            ShapeError: the parts are not of the same heads.
        """
        parts = checked_same_heads(parts, lambda part: part.shape)
        n: Counter[Key] = Counter()
        right: dict[Key, Tensor] = {}
        offsets: dict[Key, Counter[int]] = {}
        for part in parts:
            n.update(part.n)
            for key, counts in part.right.items():
                right[key] = right[key] + counts if key in right else counts
                offsets.setdefault(key, Counter()).update(part.offsets[key])
        return SyntaxEvidence(parts[0].shape, n, right, offsets)

    def table(self, *, least: int = 1, chosen_on: SyntaxEvidence | None = None) -> SyntaxTable:
        """The best head and the best offset for each relation and direction of at least `least` words, by relation.

        Both are the best of many, selected on the same counts, which is optimistic. With `chosen_on`, evidence of other
        sentences, they are selected there and scored here.

        >>> import torch
        >>> sentence = Sentence(("a", "b"), (1, -1), ("det", "root"))
        >>> heads = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.1, 0.9], [0.5, 0.5]]])
        >>> SyntaxEvidence.from_weights(heads, sentence).table()[0].head
        (1,)
        """
        rows = []
        for key in sorted(self.n):
            selection = self if chosen_on is None else chosen_on
            if self.n[key] < least or key not in selection.n:
                continue
            head = int(selection.right[key].argmax())
            offset = min(selection.offsets[key], key=lambda step: (-selection.offsets[key][step], abs(step), step))
            n, index = self.n[key], torch.unravel_index(torch.tensor(head), self.shape)
            accuracy, baseline = int(self.right[key][head]) / n, self.offsets[key][offset] / n
            rows.append(RelationAccuracy(*key, tuple(map(int, index)), accuracy, n, offset, baseline))
        return SyntaxTable(rows)

    def accuracies(self, relation: str, direction: Direction) -> Tensor:
        """The accuracy of each head for one relation and direction, in the shape of the heads.

        Raises:
            ConfigurationError: the relation did not occur, or there is no such direction.
        """
        if direction not in get_args(Direction) or (relation, direction) not in self.n:
            known = ", ".join(sorted({relation for relation, _ in self.n}))
            raise ConfigurationError(
                f"there is no evidence on {relation!r}, {direction!r}: relations are {known}; directions are "
                f"{' and '.join(map(repr, get_args(Direction)))}"
            )
        return (self.right[relation, direction] / self.n[relation, direction]).reshape(self.shape)


def _predictions(between: Tensor) -> Tensor:
    """The other word with the largest weight, for each word: (heads, W); -1 where all are 0."""
    words = torch.arange(between.shape[-1])
    others = between.clone()
    others[:, words, words] = 0.0
    best = others.max(-1)
    return best.indices.masked_fill(~(best.values > 0), -1)


def _labelled_rows(sentence: Sentence) -> Iterator[tuple[Key, int, list[int]]]:
    """The right answers of each row, for each relation and direction."""
    dependents: dict[tuple[str, int], list[int]] = {}
    for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
        if head >= 0:
            yield (relation, "dependent to head"), word, [head]
            dependents.setdefault((relation, head), []).append(word)
    for (relation, head), words in dependents.items():
        yield (relation, "head to dependent"), head, words


Span = tuple[int, int]
"""The first and the last word of a mention, from 0: a closed interval."""


@dataclass(frozen=True, eq=False)
class CoreferenceEvidence:
    """Counts of n mentions: those that each head resolves, those that the nearest earlier mention resolves, and chance.

    `CoreferenceEvidence.total(parts)` sums the evidence of several texts.
    """

    right: Tensor
    n: int
    nearest: int
    chance: float

    @classmethod
    def from_weights(cls, between: Tensor, clusters: Sequence[Sequence[Span]]) -> CoreferenceEvidence:
        """Counts for one text, from the weights between its words, (..., W, W), as `word_weights` returns them.

        A mention's candidates are all mentions that end before it begins; the prediction is the candidate with
        the largest weight, summed over the candidate's words and averaged over the mention's own, the first of equals.
        It is right if it is of the same cluster. Only mentions with a choice count: an antecedent and another mention
        among the candidates. The baseline predicts the candidate that ends last; chance is a uniform choice.

        Args:
            between: weights between words.
            clusters: mentions that refer to the same entity; an entity with one mention is a cluster of one.

        Raises:
            ShapeError: weights that are not square, or mentions that are not among the words.

        Source: Clark et al. 2019 (arXiv 1906.04341), section 4.3, who use the weight between head words.

        >>> import torch
        >>> between = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.7, 0.2, 0.1]]])
        >>> found = CoreferenceEvidence.from_weights(between, [[(0, 0), (2, 2)], [(1, 1)]])
        >>> found.n, found.accuracies, found.nearest
        (1, tensor([1.]), 0)
        """
        between = checked_weights(between)
        words = between.shape[-1]
        spans = [(span, number) for number, cluster in enumerate(clusters) for span in cluster]
        if between.shape[-2] != words or any(not 0 <= first <= last < words for (first, last), _ in spans):
            raise ShapeError(
                f"the weights between words have the shape {tuple(between.shape)}, and the mentions are "
                f"{[span for span, _ in spans]}: they need a square of words, and each mention its first and last word "
                f"in 0 to {words - 1}"
            )
        right = torch.zeros(between.shape[:-2], dtype=torch.int64)
        n, nearest, chance = 0, 0, 0.0
        for (first, last), cluster in spans:
            before = [(span, number) for span, number in spans if span[1] < first]
            matches = [number == cluster for _, number in before]
            if not any(matches) or all(matches):
                continue
            row = between[..., first : last + 1, :].mean(-2)
            weights = torch.stack([row[..., start : end + 1].sum(-1) for (start, end), _ in before], -1)
            best = weights.max(-1)
            right += torch.tensor(matches)[best.indices] & (best.values > 0)
            closest = max(range(len(before)), key=lambda number: before[number][0][::-1])
            n, nearest, chance = n + 1, nearest + matches[closest], chance + sum(matches) / len(matches)
        return cls(right, n, nearest, chance)

    @staticmethod
    def total(parts: Iterable[CoreferenceEvidence]) -> CoreferenceEvidence:
        """The sum of several parts.

        Raises:
            ConfigurationError: no parts.
            ShapeError: the parts are not of the same heads.
        """
        parts = checked_same_heads(parts, lambda part: tuple(part.right.shape))
        return CoreferenceEvidence(
            torch.stack([part.right for part in parts]).sum(0),
            sum(part.n for part in parts),
            sum(part.nearest for part in parts),
            sum(part.chance for part in parts),
        )

    @property
    def accuracies(self) -> Tensor:
        """The share of mentions that each head resolves; NaN where none counts."""
        return self.right / self.n if self.n else torch.full(self.right.shape, float("nan"))

    def __str__(self) -> str:
        if not self.n or not self.right.numel():
            return "no mention with a choice was counted"
        best = int(self.right.argmax())
        index = torch.unravel_index(torch.tensor(best), self.right.shape)
        return (
            f"head {'-'.join(str(int(number)) for number in index)}: {int(self.right.flatten()[best]) / self.n:.1%} of "
            f"{self.n:,} mentions, nearest mention {self.nearest / self.n:.1%}, by chance {self.chance / self.n:.1%}"
        )
