"""Read the short list of a translator of Marian: a binary file, or a text of words and how probable they are."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regard.errors import CheckpointError, ConfigurationError
from regard.models.transformer.short_list import ShortList
from regard.translation.corpus import read_lines

MAGIC = 0xF11A48D5013417F5
"""What a binary file begins with."""
_FIRST, _BEST = 100, 100
"""Marian's own, where the settings say nothing of a text."""


@dataclass(frozen=True)
class ListedVocabularies:
    """The ids of both sides by piece; `is_one` if they are one vocabulary, in which a word may become itself."""

    source: Mapping[str, int]
    target: Mapping[str, int]
    end: int
    unknown: str
    is_one: bool


def read_short_list(path: Path, numbers: Sequence[Any], vocabularies: ListedVocabularies) -> ShortList:
    """Read a short list; `numbers` are what the settings say behind the file's name.

    A binary file has six uint64, a number that is always the same, a checksum, which is not read, how many first words
    of the target are always listed, how many words a source word has at most, and two lengths; uint64 starts for each
    source word and one more; uint32 ids. A text has lines of a target word, a source word, and a probability; there the
    numbers are how many first words, how many words of a source word, the most probable, and the least probability.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is of other vocabularies; a line that is none.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    is_binary = int.from_bytes(content[:8], "little") == MAGIC
    first, starts, words = _binary(path, content) if is_binary else _text(path, numbers, vocabularies)
    size = max(vocabularies.source.values()) + 1
    if len(starts) != size + 1:
        raise CheckpointError(
            f"{path} is a short list of {len(starts) - 1:,} source words, and the vocabulary has {size:,}"
        )
    target_size = max(vocabularies.target.values()) + 1
    always = torch.tensor(sorted({*range(min(first, target_size)), vocabularies.end}))
    try:
        listed = ShortList(always, torch.from_numpy(starts), torch.from_numpy(words), target_size)
    except ConfigurationError as error:
        raise CheckpointError(f"{path} is damaged, or of another vocabulary: {error}") from None
    return _with_sources(listed) if vocabularies.is_one else listed


def _binary(path: Path, content: bytes) -> tuple[int, np.ndarray, np.ndarray]:
    """How many first words, the starts, and the words."""
    header = [int(number) for number in np.frombuffer(content[: len(content) // 8 * 8], "<u8")[:6]]
    starts, words = header[4:] if len(header) == 6 else (0, 0)
    if len(content) != 48 + 8 * starts + 4 * words or not starts:
        raise CheckpointError(
            f"{path} is damaged: it has {len(content):,} bytes, and a short list of {starts:,} starts and {words:,} "
            f"words has {48 + 8 * starts + 4 * words:,}"
        )
    offsets = np.frombuffer(content, "<u8", starts, 48).astype(np.int64)
    return header[2], offsets, np.frombuffer(content, "<u4", words, 48 + 8 * starts).astype(np.int64)


def _text(path: Path, numbers: Sequence[Any], vocabularies: ListedVocabularies) -> tuple[int, np.ndarray, np.ndarray]:
    """As `_binary`."""
    first, best, least = _numbers(path, numbers)
    source, target = vocabularies.source, vocabularies.target
    found: list[dict[int, float]] = [{} for _ in range(max(source.values()) + 1)]
    for number, line in enumerate(read_lines(path), start=1):
        try:
            said, read, share = line.split()
            probability = float(share)
        except ValueError:
            raise CheckpointError(
                f"{path}, line {number}: {line[:60]!r} is no entry of a short list; it needs a target word, a source "
                "word and a probability"
            ) from None
        if "NULL" not in (said, read) and probability >= least:
            own = found[source.get(read, source[vocabularies.unknown])]
            token = target.get(said, target[vocabularies.unknown])
            own[token] = max(probability, own.get(token, 0.0))
    chosen = [sorted(heapq.nlargest(best, own, key=own.__getitem__)) for own in found]
    starts = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
    return first, starts, np.array([token for tokens in chosen for token in tokens], dtype=np.int64)


def _numbers(path: Path, numbers: Sequence[Any]) -> tuple[int, int, float]:
    try:
        told = [float(number) for number in numbers[:3]]
        first, best, least = [*told, *(_FIRST, _BEST, 0.0)[len(told) :]]
        if min(first, best) < 0 or first % 1 or best % 1:
            raise ValueError
    except (TypeError, ValueError):
        raise CheckpointError(
            f"the settings say {list(numbers)} of the short list {path}: they need to be how many first words, how "
            "many words of each source word, and the least probability"
        ) from None
    return int(first), int(best), least


def _with_sources(listed: ShortList) -> ShortList:
    """The list in which each source word may also become itself."""
    ids = np.arange(len(listed.starts) - 1)
    words = np.insert(listed.words.numpy(), listed.starts[:-1].numpy(), ids)
    starts = listed.starts + torch.arange(len(listed.starts))
    return ShortList(listed.always, starts, torch.from_numpy(words), listed.target_size)
