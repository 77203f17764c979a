"""Parallel text as ids: packed while it waits, padded into a batch when it is used."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.errors import CorpusError
from regard.translation.corpus import ParallelText
from regard.translation.vocabulary import BEGIN, END, PAD, Vocabulary


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

    def __len__(self) -> int:
        return len(self.source)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return Batch(
            source=self.source.to(device, non_blocking=non_blocking),
            source_lengths=self.source_lengths.to(device, non_blocking=non_blocking),
            target_input=self.target_input.to(device, non_blocking=non_blocking),
            target_output=self.target_output.to(device, non_blocking=non_blocking),
            target_tokens=self.target_tokens,
        )


@dataclass(frozen=True)
class IdSequences:
    """Sequences of ids, one behind the other: sequence i is `ids[offsets[i]:offsets[i + 1]]`.

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
        """Put lists of ids into one array."""
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
        ids = np.fromiter(itertools.chain.from_iterable(sequences), dtype=np.int32, count=int(offsets[-1]))
        return cls(ids, offsets)

    @property
    def lengths(self) -> np.ndarray:
        """How long each sequence is."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def pad(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sequences of `rows` side by side, int64 [rows, longest] filled up with PAD, and their lengths."""
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

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> np.ndarray:
        """What each pair takes of a batch: the tokens of its source, or of its target with END if those are more."""
        return np.maximum(self.sources.lengths, self.targets.lengths + 1)

    def checksum(self) -> int:
        """A number that tells this text from another."""
        checksum = 0
        for side in (self.sources, self.targets):
            for array in (side.offsets, side.ids):
                checksum = zlib.crc32(array.tobytes(), checksum)
        return checksum


def encode(
    text: ParallelText,
    source_vocabulary: Vocabulary,
    target_vocabulary: Vocabulary,
    max_length: int | None = None,
) -> EncodedText:
    """Turn text into ids; pairs with a side of more than `max_length` tokens are left out and counted.

    Raises:
        CorpusError: no pair is short enough.

    >>> from regard.translation.vocabulary import VocabularySettings
    >>> text = ParallelText.pair(["ab", "abcd"], ["xy", "z"])
    >>> vocabularies = [Vocabulary.train(side, VocabularySettings(kind="characters")) for side in (["abcd"], ["xyz"])]
    >>> encoded = encode(text, *vocabularies, max_length=3)
    >>> encoded.sources[0].tolist(), encoded.targets[0].tolist(), encoded.dropped_long
    ([4, 5], [4, 5], 1)
    """
    sources = source_vocabulary.encode_batch(text.sources)
    targets = target_vocabulary.encode_batch(text.targets)
    pairs = list(zip(sources, targets, strict=True))
    if max_length is not None:
        pairs = [pair for pair in pairs if len(pair[0]) <= max_length and len(pair[1]) <= max_length]
    if not pairs:
        shortest = min(max(len(source), len(target)) for source, target in zip(sources, targets, strict=True))
        raise CorpusError(
            f"all {len(text):,} pairs of {text.source_name} with {text.target_name} have a side of more than "
            f"{max_length} tokens; the shortest pair needs a max_length of {shortest}"
        )
    return EncodedText(
        sources=IdSequences.pack([source for source, _ in pairs]),
        targets=IdSequences.pack([target for _, target in pairs]),
        dropped_long=len(text) - len(pairs),
    )


def collate(text: EncodedText, rows: np.ndarray) -> Batch:
    """The pairs at `rows` as one batch, in that order."""
    source, source_lengths = text.sources.pad(rows)
    target, target_lengths = text.targets.pad(rows)
    count = len(rows)
    target_input = np.concatenate([np.full((count, 1), BEGIN), target], axis=1)  # [B, T]
    target_output = np.concatenate([target, np.full((count, 1), PAD)], axis=1)  # [B, T]
    target_output[np.arange(count), target_lengths] = END
    return Batch(
        source=torch.from_numpy(source),
        source_lengths=torch.from_numpy(source_lengths),
        target_input=torch.from_numpy(target_input),
        target_output=torch.from_numpy(target_output),
        target_tokens=int(target_lengths.sum()) + count,
    )
