"""Which sentences are computed together: those of like length, by a number of sentences or of source tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..utils.numbers import whole_number

LEAST_SENTENCES = 64
"""Sentences of a batch whose size is not named, at least."""

SOURCE_TOKENS = 2048
"""Source tokens, padding included, that a batch of more than `LEAST_SENTENCES` has at most."""

HYPOTHESES = 640
"""Hypotheses that it has at most: what a step reads of many more no longer fits into the caches of a processor."""


def batches_by_length(
    sources: Sequence[Sequence[int]], batch_size: int | None, beam: int = 1, forced: Sequence[int] | None = None
) -> Iterator[list[int]]:
    """The rows of the sentences that have tokens, the longest first, in batches of so many sentences.

    Without `batch_size` a batch is 64 sentences, or more where they are short: as many as have 2,048 tokens with their
    padding, and 640 hypotheses in beams of `beam`. A step of decoding costs less for each sentence the more there are;
    2,048 tokens are those of 64 sentences of 32, so short sentences take no more memory than these do.

    forced: the number of tokens that the translation of each has to hold. Sentences with equal numbers are together,
    and fewer, since each number of tokens that a translation holds already has a beam of its own.

    Raises:
        ConfigurationError: a `batch_size` that is no whole number of at least 1.

    >>> list(batches_by_length([[5], [5, 6, 7], [], [5, 6]], 2))
    [[1, 3], [0]]
    >>> [len(rows) for rows in batches_by_length([[5] * 10] * 300 + [[5] * 60] * 100, None, beam=5)]
    [64, 64, 128, 128, 16]
    """
    if batch_size is not None:
        whole_number("batch_size", batch_size)
    return _batches(sources, batch_size, beam, forced or [0] * len(sources))


def _batches(
    sources: Sequence[Sequence[int]], batch_size: int | None, beam: int, numbers: Sequence[int]
) -> Iterator[list[int]]:
    for count in sorted(set(numbers)):
        rows = [row for row, ids in enumerate(sources) if ids and numbers[row] == count]
        rows.sort(key=lambda row: -len(sources[row]))
        start = 0
        while start < len(rows):
            together = _sentences(len(sources[rows[start]]), beam) if batch_size is None else batch_size
            end = start + max(1, together // (count + 1))
            yield rows[start:end]
            start = end


def _sentences(longest: int, beam: int) -> int:
    return max(LEAST_SENTENCES, min(SOURCE_TOKENS // longest, HYPOTHESES // beam))
