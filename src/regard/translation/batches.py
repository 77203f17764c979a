"""Batches of sentence pairs: which pairs go together is a pure function of the seed and the epoch."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from regard.errors import CorpusError
from regard.translation.encoding import Batch, EncodedText, IdSequences, collate, encode

__all__ = [
    "Batch",
    "BatchPlan",
    "EncodedText",
    "IdSequences",
    "OrderedBatches",
    "TokenBatches",
    "collate",
    "encode",
]


class BatchPlan(Protocol):
    """Says which rows of a text make up each batch of an epoch; as many batches in every epoch."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        ...

    def epoch(self, epoch: int) -> list[np.ndarray]:
        """The rows of each batch."""
        ...

    def fingerprint(self) -> dict[str, int]:
        """What two plans need to share to give the same batches."""
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
        """The rows of each batch that this process gets in the epoch, in order."""
        random = np.random.default_rng([self._seed, epoch])
        shuffled = random.permutation(len(self._lengths))
        rows = shuffled[np.argsort(self._lengths[shuffled], kind="stable")]
        steps = random.permutation(self._cuts)  # the same in every process
        return [rows[start:end] for start, end in steps[:, self._rank]]

    def fingerprint(self) -> dict[str, int]:
        """What the batches of all processes depend on."""
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
        """What the batches of all processes depend on."""
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
