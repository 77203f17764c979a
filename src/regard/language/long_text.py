"""A long text as bytes, and the sequences of it that each update and the validation read."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard.errors import ConfigurationError, CorpusError
from regard.language.language_experiment import LongTextSettings


def read_bytes(settings: LongTextSettings) -> Tensor:
    """The bytes of all files, one after the other, uint8 (N,).

    Raises:
        CorpusError: a file is missing, cannot be read, or is damaged gzip; a folder has no files.
    """
    parts = []
    for path in _paths(settings):
        try:
            data = path.read_bytes()
            parts.append(gzip.decompress(data) if path.suffix == ".gz" else data)
        except (OSError, EOFError) as error:
            raise CorpusError(f"data.files: {path} cannot be read ({error}); name a text file, plain or gzip") from None
    return torch.from_numpy(np.frombuffer(b"".join(parts), np.uint8).copy())


def _paths(settings: LongTextSettings) -> Iterator[Path]:
    for name in settings.files:
        path = settings.folder / name
        inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
        if not inside:
            raise CorpusError(f"data.files: the folder {path} has no files")
        yield from inside


@dataclass(frozen=True)
class LongText:
    """A text that is trained on, and its end, which is validated on.

    train, held_out: uint8 (N,). length: tokens of a sequence, which needs one byte more: the last to be predicted.
    """

    train: Tensor
    held_out: Tensor
    length: int

    @classmethod
    def read(cls, settings: LongTextSettings) -> LongText:
        """The text of an experiment.

        Raises:
            CorpusError: a file cannot be read.
            ConfigurationError: the text, or what is held out of it, is shorter than a sequence.
        """
        whole = read_bytes(settings)
        needed = settings.length + 1
        if 0 < settings.held_out < needed:
            raise ConfigurationError(
                f"data.held_out: has {settings.held_out:,} bytes; a sequence of data.length {settings.length:,} and "
                f"the byte after it need {needed:,}, or 0 holds nothing out"
            )
        left = len(whole) - settings.held_out
        if left < needed:
            raise ConfigurationError(
                f"data.files: the text has {len(whole):,} bytes, of which {max(left, 0):,} are left to train on; a "
                f"sequence of data.length {settings.length:,} and the byte after it need {needed:,}: give more text, "
                "or shorter sequences"
            )
        return cls(whole[:left], whole[left:], settings.length)

    def sequence(self, *seed: int) -> Tensor:
        """A sequence and the byte after it, int64 (length + 1,), from a place drawn by the numbers of a seed."""
        generator = np.random.default_rng(seed)
        start = int(generator.integers(len(self.train) - self.length))
        return self.train[start : start + self.length + 1].long()

    def validation(self) -> list[Tensor]:
        """The held-out text in sequences, each with the byte after it; a rest shorter than a sequence is left out."""
        starts = range(0, len(self.held_out) - self.length, self.length)
        return [self.held_out[start : start + self.length + 1].long() for start in starts]
