"""The file of a finished run: what was trained with which settings, and what was measured."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.errors import CorpusError
from regard.language.language_experiment import LanguageExperiment
from regard.language.train_language_model import MODEL
from regard.translation.experiment import Experiment
from regard.utils.atomic_files import atomic_write

VERSION = 1
"""Of the files; those of another are not read."""


@dataclass(frozen=True)
class RunKey:
    """All that a run depends on: a finished run with an equal key is used again.

    settings: the experiment, with its seed; its name and data.folder left out. measured: how the model is measured.
    text: a checksum of each file, by the key that names it.
    """

    settings: Mapping[str, Any]
    measured: Mapping[str, Any]
    text: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """The key as a JSON value, the version included."""
        return json.loads(json.dumps({"version": VERSION, **asdict(self)}))

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits, for names of files."""
        return f"{zlib.crc32(json.dumps(self.as_json(), sort_keys=True).encode()):08x}"


@dataclass(frozen=True)
class RunRecord:
    """What was measured of one run.

    - `statistics`: of each sentence, or sequence, of the test text; their sum has the quality.
    - `lengths`: source tokens of each sentence; empty where quality by length is not measured.
    - `parameters`; `updates`; `seconds`: of training, without validating and saving.
    - `cpu_seconds`: of the processor, for training with reading, validating and saving.
    - `peak_bytes`: the most memory of the process while training, above what it had before; None where unknown.
    - `speed`: sentences translated, or bytes generated, in a second; None where that is not measured.
    - `cache_bytes`: of the decoding cache at the end of decoding; None where that is not measured.
    - `gradients`: measures of the query and key projections by name; empty where these are not measured.
    """

    statistics: list[list[float]]
    parameters: int
    updates: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int | None
    lengths: list[int] = field(default_factory=list)
    speed: float | None = None
    cache_bytes: int | None = None
    gradients: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def sums(self) -> NDArray[np.float64]:
        """The statistics of each sentence, (sentences, k)."""
        return np.array(self.statistics, dtype=np.float64)

    def save(self, path: Path, key: RunKey) -> None:
        """Write the record with its key, replaced atomically.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with atomic_write(path) as partial:
            partial.write_text(json.dumps({"key": key.as_json(), "run": asdict(self)}), encoding="utf-8")

    @classmethod
    def load(cls, path: Path, key: RunKey) -> RunRecord | None:
        """The record of a finished run with this key; None where there is none, or the file is of other settings."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["key"] != key.as_json() or data["run"].keys() != {one.name for one in fields(cls)}:
                return None
            return cls(**data["run"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def file_checksums(experiment: Experiment | LanguageExperiment) -> dict[str, int]:
    """CRC-32 of each file that a run reads, by dotted key; a folder counts with all its files.

    These are the files of `data`, and the weights of `training.start_from`.

    Raises:
        CorpusError: a file cannot be read.
    """
    paths = [(name, experiment.data.folder / path) for name, path in _paths(experiment.data, "data")]
    if (start := experiment.training.start_from) is not None:
        paths.append(("training.start_from", start / MODEL if start.is_dir() else start))
    return {name: _checksum(path, name) for name, path in paths}


def _paths(section: Any, prefix: str) -> list[tuple[str, Path]]:
    """The files of a section of settings, by dotted key."""
    found: list[tuple[str, Path]] = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path) and name != "folder":
            found.append((f"{prefix}.{name}", value))
        elif isinstance(value, tuple) and value and all(isinstance(one, Path) for one in value):
            found += [(f"{prefix}.{name}.{number}", one) for number, one in enumerate(value)]
        elif hasattr(type(value), "model_fields"):
            found += _paths(value, f"{prefix}.{name}")
    return found


def _checksum(path: Path, name: str) -> int:
    checksum = 0
    for file in sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]:
        try:
            checksum = zlib.crc32(file.read_bytes(), checksum)
        except OSError as error:
            raise CorpusError(f"{name}: {file} cannot be read ({error.strerror}); name a file that is there") from None
    return checksum
