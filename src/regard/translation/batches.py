"""Parallel text as ids, and its batches: a pure function of the seed and the epoch.

Text is stored packed, without padding; `collate` pads the pairs of a batch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from regard.errors import CorpusError
from regard.translation.corpus import ParallelText
from regard.translation.vocabulary import OWN_IDS, PAD, SpecialIds, Vocabulary


@dataclass(frozen=True)
class Batch:
    """B sentence pairs, S tokens of the longest source and T of the longest target with its END; PAD fills the rest."""

    source: Tensor
    """[B, S] int64, without BEGIN and END."""
    source_lengths: Tensor
    """[B] int64."""
    target_input: Tensor
    """[B, T] int64: BEGIN y1 y2 ..."""
    target_output: Tensor
    """[B, T] int64: y1 y2 ... END."""
    target_tokens: int
    """How many target outputs are not PAD: what a loss per token is divided by."""
    links: Tensor | None = None
    """[L, 3] int64, where links of tokens are known: the row of each in the batch, its target and its source token."""

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Copy the batch to another device."""
        return Batch(
            source=self.source.to(device, non_blocking=non_blocking),
            source_lengths=self.source_lengths.to(device, non_blocking=non_blocking),
            target_input=self.target_input.to(device, non_blocking=non_blocking),
            target_output=self.target_output.to(device, non_blocking=non_blocking),
            target_tokens=self.target_tokens,
            links=None if self.links is None else self.links.to(device, non_blocking=non_blocking),
        )


@dataclass(frozen=True)
class IdSequences:
    """Packed sequences of ids: sequence i is `ids[offsets[i]:offsets[i + 1]]`.

    >>> sequences = IdSequences.pack([[5, 6], [], [7]])
    >>> sequences.offsets.tolist(), sequences.lengths.tolist(), sequences[2].tolist()
    ([0, 2, 2, 3], [2, 0, 1], [7])
    """

    ids: np.ndarray
    """int32."""
    offsets: np.ndarray
    """int64, one more than there are sequences."""

    @classmethod
    def pack(cls, sequences: Sequence[Sequence[int]]) -> IdSequences:
        """Pack lists of ids into one array."""
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
        ids = np.fromiter(itertools.chain.from_iterable(sequences), dtype=np.int32, count=int(offsets[-1]))
        return cls(ids, offsets)

    @property
    def lengths(self) -> np.ndarray:
        """Length of each sequence."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def pad(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pad the sequences of `rows`: int64 [rows, longest] with PAD behind, and their lengths."""
        starts, lengths = self.offsets[rows], self.lengths[rows]
        columns = np.arange(lengths.max())
        inside = columns < lengths[:, None]  # [rows, longest]
        padded = np.full(inside.shape, PAD, dtype=np.int64)
        padded[inside] = self.ids[(starts[:, None] + columns)[inside]]
        return padded, lengths


@dataclass(frozen=True)
class EncodedText:
    """Parallel text as ids, without BEGIN and END."""

    sources: IdSequences
    targets: IdSequences
    dropped_long: int = 0
    """How many pairs were left out because a side was longer than allowed."""
    links: IdSequences | None = None
    """Where links are known, those of the tokens of each pair, one after another: target token, source token."""

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each pair's source, or of its target with END if those are more: its share of a batch."""
        return np.maximum(self.sources.lengths, self.targets.lengths + 1)

    def checksum(self) -> int:
        """CRC-32 of all ids, lengths and links."""
        checksum = 0
        for side in (self.sources, self.targets, *([] if self.links is None else [self.links])):
            for array in (side.offsets, side.ids):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum


def encode(
    text: ParallelText,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    max_length: int | None = None,
    *,
    copies: bool = False,
) -> EncodedText:
    """Turn text into ids; pairs with a side of more than `max_length` tokens are left out and counted.

    For a model that `copies`, words of a source that the vocabularies lack have ids of their own in its pair
    (`Vocabulary.extended`).

    Raises:
        CorpusError: no pair is short enough.

    >>> from regard.translation.vocabulary import VocabularySettings
    >>> text = ParallelText.pair(["ab", "abcd"], ["xy", "z"])
    >>> vocabularies = [Vocabulary.train(side, VocabularySettings(kind="characters")) for side in (["abcd"], ["xyz"])]
    >>> encoded = encode(text, *vocabularies, max_length=3)
    >>> encoded.sources[0].tolist(), encoded.targets[0].tolist(), encoded.dropped_long
    ([4, 5], [4, 5], 1)
    """
    if copies:
        sources = [source_vocabulary.extended(line).encode(line) for line in text.sources]
        lines = zip(text.sources, text.targets, strict=True)
        targets = [target_vocabulary.extended(source).encode(line) for source, line in lines]
    else:
        sources, targets = source_vocabulary.encode_batch(text.sources), target_vocabulary.encode_batch(text.targets)
    pairs = list(zip(sources, targets, strict=True))
    kept = [
        row for row, pair in enumerate(pairs) if max_length is None or max(len(pair[0]), len(pair[1])) <= max_length
    ]
    if not kept:
        shortest = min(max(len(source), len(target)) for source, target in pairs)
        raise CorpusError(
            f"all {len(text):,} pairs of {text.source_name} with {text.target_name} have a side of more than "
            f"{max_length} tokens; the shortest pair needs a max_length of {shortest}"
        )
    vocabularies = source_vocabulary, target_vocabulary
    return EncodedText(
        sources=IdSequences.pack([sources[row] for row in kept]),
        targets=IdSequences.pack([targets[row] for row in kept]),
        dropped_long=len(text) - len(kept),
        links=None if text.links is None else IdSequences.pack([_token_links(text, row, vocabularies) for row in kept]),
    )


def _token_links(text: ParallelText, row: int, vocabularies: tuple[Vocabulary, Vocabulary]) -> list[int]:
    """The links of one pair: each token of a word with each token of the word that it is linked to."""
    if text.links is None or not text.links[row]:
        return []
    spans = []  # of both sides, the tokens of each word
    for line, vocabulary in zip((text.sources[row], text.targets[row]), vocabularies, strict=True):
        counts = [len(ids) for ids in vocabulary.encode_words(line)]
        starts = [0, *itertools.accumulate(counts)]
        spans.append([range(*ends) for ends in itertools.pairwise(starts)])
    linked = sorted(
        (target, source)
        for source_word, target_word in text.links[row]
        for source in spans[0][source_word]
        for target in spans[1][target_word]
    )
    return list(itertools.chain.from_iterable(linked))


def collate(text: EncodedText, rows: np.ndarray, special: SpecialIds = OWN_IDS) -> Batch:
    """Pad the pairs at `rows` into one batch, in that order; `special` are the ids of the target's vocabulary."""
    source, source_lengths = text.sources.pad(rows)
    target, target_lengths = text.targets.pad(rows)
    count = len(rows)
    target_input = np.concatenate([np.full((count, 1), special.begin), target], axis=1)  # [B, T]
    target_output = np.concatenate([target, np.full((count, 1), special.pad)], axis=1)  # [B, T]
    target_output[np.arange(count), target_lengths] = special.end
    return Batch(
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target_input=torch.from_numpy(target_input),
        target_output=torch.from_numpy(target_output),
        target_tokens=int(target_lengths.sum()) + count,
        links=None if text.links is None else torch.from_numpy(_collate_links(text.links, rows)),
    )


def _collate_links(links: IdSequences, rows: np.ndarray) -> np.ndarray:
    """The links of the pairs at `rows`, each with its place in the batch: [L, 3] int64."""
    found = [links[row].reshape(-1, 2) for row in rows]
    places = np.repeat(np.arange(len(rows)), [len(one) for one in found])
    return np.column_stack([places, np.concatenate(found).astype(np.int64)])


class BatchPlan(Protocol):
    """Rows of a text for each batch of an epoch; every epoch has as many batches."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch."""
        ...

    def fingerprint(self) -> dict[str, int]:
        """Values that two plans with the same batches have in common."""
        ...


class TokenBatches:
    """Random batches of at most `batch_tokens` tokens, padding included, as a pure function of the seed and the epoch.

    Pairs are sorted by length, those of one length in random order, and cut into batches as large as the budget
    allows; then the batches are shuffled. The tokens of a batch are its pairs times the longest source, or times the
    longest target with END, whichever is more. A pair longer than the budget makes a batch of its own. The cuts depend
    on the lengths alone, so that each epoch has as many batches as any other: trainers rely on it.

    Each of `world_size` processes gets as many batches, every pair goes to one of them, and what they get at the same
    step is of about the same length, so that none waits for another. Where the batches do not divide evenly, the ones
    with the most pairs are halved.

    Raises:
        CorpusError: there are too few pairs to give each process as many batches.

    >>> text = EncodedText(IdSequences.pack([[4]] * 5), IdSequences.pack([[4], [4], [4], [4, 4, 4], [4]]))
    >>> batches = TokenBatches(text, batch_tokens=4, seed=1)
    >>> sorted(sorted(rows.tolist()) for rows in batches.epoch(0))[-1]
    [3]
    >>> [len(batches.epoch(epoch)) for epoch in range(3)]
    [3, 3, 3]
    """

    def __init__(self, text: EncodedText, batch_tokens: int, seed: int, rank: int = 0, world_size: int = 1):
        self._lengths = text.lengths
        self._rank, self._seed = rank, seed
        cuts = _cut(np.sort(self._lengths), batch_tokens)
        self._cuts = _make_divisible(cuts, world_size).reshape(-1, world_size, 2)  # [steps, processes, (start, end)]
        self._fingerprint = {"batch_tokens": batch_tokens, "seed": seed, "world_size": world_size}
        self._fingerprint |= {"pairs": len(text), "text": text.checksum()}

    def __len__(self) -> int:
        return len(self._cuts)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch that this process gets in the epoch, in order: a function of seed and epoch alone."""
        random = np.random.default_rng([self._seed, epoch])
        shuffled = random.permutation(len(self._lengths))
        rows = shuffled[np.argsort(self._lengths[shuffled], kind="stable")]
        steps = random.permutation(self._cuts)  # the same in every process
        return [rows[start:end] for start, end in steps[:, self._rank]]

    def fingerprint(self) -> dict[str, int]:
        """Values that the batches of all processes depend on."""
        return dict(self._fingerprint)


class OrderedBatches:
    """The same batches in every epoch, short pairs first: for validation.

    Of several processes each gets every `world_size`-th batch, so that some may get one more than others.
    """

    def __init__(self, text: EncodedText, batch_tokens: int, rank: int = 0, world_size: int = 1):
        rows = np.argsort(text.lengths, kind="stable")
        cuts = _cut(text.lengths[rows], batch_tokens)
        self._batches = [rows[start:end] for start, end in cuts[rank::world_size]]
        self._fingerprint = {"batch_tokens": batch_tokens, "world_size": world_size}
        self._fingerprint |= {"pairs": len(text), "text": text.checksum()}

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch; every epoch is the same."""
        return list(self._batches)

    def fingerprint(self) -> dict[str, int]:
        """Values that the batches of all processes depend on."""
        return dict(self._fingerprint)


def _cut(lengths: np.ndarray, batch_tokens: int) -> np.ndarray:
    """Cut ascending lengths into runs of at most `batch_tokens` padded tokens: [runs, (start, end)]."""
    cuts, start = [], 0
    while start < len(lengths):
        most = max(1, batch_tokens // max(1, int(lengths[start])))
        candidates = lengths[start : start + most]
        padded = candidates * np.arange(1, len(candidates) + 1)  # tokens if the run ended here; ascending
        end = start + max(1, int(np.searchsorted(padded, batch_tokens, side="right")))
        cuts.append((start, end))
        start = end
    return np.array(cuts, dtype=np.int64).reshape(-1, 2)


def _make_divisible(cuts: np.ndarray, world_size: int) -> np.ndarray:
    """Halve the runs with the most pairs until their number divides by `world_size`."""
    runs = cuts.tolist()
    while len(runs) % world_size:
        largest = max(range(len(runs)), key=lambda i: runs[i][1] - runs[i][0])
        start, end = runs[largest]
        if end - start == 1:
            raise CorpusError(
                f"{len(runs)} batches of one pair each cannot be shared evenly among {world_size} processes; "
                "use fewer processes, more text, or more batch_tokens"
            )
        middle = (start + end) // 2
        runs[largest : largest + 1] = [[start, middle], [middle, end]]
    return np.array(runs, dtype=np.int64)
