"""The folder of a training run: its files, the lock that one training has on it, its export, means of its weights."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard.errors import CheckpointError, ConfigurationError, MissingExtra, nearest
from regard.translation.alignment_choice import FILE as ALIGNMENT
from regard.translation.checkpoint import load_weights, read_header, save_tensors
from regard.translation.experiment import Experiment
from regard.translation.placeholders import FILE as PLACEHOLDERS
from regard.translation.trust import FILE as TRUST
from regard.translation.vocabulary import Vocabulary
from regard.utils.atomic_files import atomic_write
from regard.utils.other_types import path_of

try:
    import fcntl
except ImportError:  # Windows, where a run has no lock
    fcntl = None

Which = Literal["best", "last", "average"]
"""Weights of a run: those that validated best, those of the last save, those that `regard average` made."""

_NEEDED = "it needs to be the folder of a run of `regard train`"
_OTHERS = "or of a translator that transformers or Marian saved"


@dataclass(frozen=True)
class RunFolder:
    """The folder of one training run, by the names that everything reads and writes it under."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The settings in effect."""
        return self.path / "experiment.yaml"

    @property
    def source_vocabulary(self) -> Path:
        return self.path / "source.vocabulary.json"

    @property
    def target_vocabulary(self) -> Path:
        return self.path / "target.vocabulary.json"

    @property
    def best(self) -> Path:
        """The weights with the best validation score."""
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        """The latest weights that were saved, without the training state."""
        return self.path / "last.safetensors"

    @property
    def average(self) -> Path:
        """The mean of several weights."""
        return self.path / "average.safetensors"

    @property
    def saved_weights(self) -> Path:
        """Folder of weights saved at single validations."""
        return self.path / "weights"

    def weights_after(self, update: int) -> Path:
        """Weights saved at the validation after an update."""
        return self.saved_weights / f"update-{update:08}.safetensors"

    @property
    def state(self) -> Path:
        """The training state to resume from: weights, optimiser, progress, batches and settings."""
        return self.path / "state" / "training.safetensors"

    @property
    def alignment(self) -> Path:
        """Which attention links words, where `regard align --choose` has found it."""
        return self.path / ALIGNMENT

    @property
    def trust(self) -> Path:
        """How far its translations can be trusted, where `regard test --calibrate` has learned it."""
        return self.path / TRUST

    @property
    def placeholders(self) -> Path:
        """What stands for the copied parts of a line, where the text was prepared with placeholders."""
        return self.path / PLACEHOLDERS

    @property
    def logs(self) -> Path:
        """Logs for TensorBoard."""
        return self.path / "logs"

    def vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        """Read the source and target vocabularies.

        Raises:
            VocabularyError: one is not there, or was damaged.
        """
        return Vocabulary.load(self.source_vocabulary), Vocabulary.load(self.target_vocabulary)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and lock it for one training while the block runs; the lock ends with its process.

        The lock is on the folder itself (flock) and leaves no file. File systems without locks have none.

        Raises:
            CheckpointError: another process trains in the folder, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.path} ({error.strerror})") from None
        if fcntl is None:
            yield
            return
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot open the folder {self.path} ({error.strerror})") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise CheckpointError(
                f"another process is training in {self.path}, and one would overwrite what the other saves; wait for "
                "it to end, or choose another folder"
            ) from None
        except OSError:  # no locks on this file system
            pass
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile have a copy of the descriptor
            os.close(descriptor)

    def missing_for(self, weights: Path) -> list[str]:
        """Names of missing files among the weights and those that they are used with."""
        needed = (self.experiment, self.source_vocabulary, self.target_vocabulary, weights)
        return [path.name for path in needed if not path.is_file()]

    def weights(self, which: Which) -> Path:
        """The file of the chosen weights, after checking that the folder has all that translating needs.

        Raises:
            CheckpointError: the folder or one of its files is missing.
            ConfigurationError: no run keeps weights of that name.
            MissingExtra: the folder is one of the distribution regard-models, which is not installed.
        """
        if which not in get_args(Which):
            known = nearest(which, get_args(Which))
            raise ConfigurationError(f"which is {which!r}, but a run keeps no such weights; {known}")
        if not self.path.is_dir():
            if MODELS in self.path.parents:
                raise MissingExtra(
                    f"this needs the translator {self.path.relative_to(MODELS).as_posix()!r} of the package "
                    "'regard-models', which is not installed; pip install regard-models brings it"
                )
            if self.path.exists():
                raise CheckpointError(f"{self.path} is a file; {_NEEDED}, {_OTHERS}")
            raise CheckpointError(
                f"there is no folder {self.path}; {_NEEDED}, {_OTHERS}, or the name of one that regard comes with, and "
                f"nothing is downloaded; {nearest(self.path.as_posix(), INSTALLED)}"
            )
        weights = getattr(self, which)
        missing = self.missing_for(weights)
        if missing == [weights.name]:
            others = [path for path in (self.best, self.last, self.average) if path.is_file()]
            mend = (
                f"choose {others[0].stem!r}, which it has" if others else "the training has not saved any weights yet"
            )
            raise CheckpointError(f"the folder {self.path} has no {weights.name}; {mend}")
        if missing:
            others = f", {_OTHERS}, with config.json or decoder.yml" if self.experiment.name in missing else ""
            raise CheckpointError(f"the folder {self.path} has no {', '.join(missing)}; {_NEEDED}{others}")
        return weights


def _models() -> Path:
    """The folder of the distribution regard-models, found without importing it, or where it would be."""
    found = find_spec("regard_models")
    return Path(found.origin).parent if found and found.origin else Path(__file__).parents[2] / "regard_models"


MODELS = _models()
"""The folder of the trained translators, which are a distribution of their own."""

ENGLISH_FRENCH = MODELS / "english_french"
"""A small Transformer for everyday sentences, exported from `recipes/tatoeba-english-french.yaml`: a folder for
`Translator.load`. Its README.md tells what it learned from, how good it is, and what it is not for."""

ENGLISH_FRENCH_LONGER = MODELS / "english_french_longer"
"""The same Transformer, trained on by `recipes/english-french-longer.yaml`: it reads captions and several sentences in
a line, and copies numbers, names, addresses and quoted words. For non-commercial use, as its README.md says."""

KOREAN_ENGLISH = {
    "dot": MODELS / "korean_english" / "luong",
    "additive": MODELS / "korean_english" / "bahdanau",
}
"""Recurrent translators of short sentences, by their scores, exported from `recipes/tatoeba-korean-english-*.yaml`:
folders for `Translator.load`. The README.md beside them tells how good they are."""

INSTALLED = {
    "english_french": ENGLISH_FRENCH,
    "english_french_longer": ENGLISH_FRENCH_LONGER,
    "korean_english/luong": KOREAN_ENGLISH["dot"],
    "korean_english/bahdanau": KOREAN_ENGLISH["additive"],
}
"""Folders of the translators that regard comes with, by the names that commands and `Translator.load` take."""

LANGUAGES = ("English", "French")
"""From and to."""


def translator_folder(name: str | Path) -> Path:
    """The folder of a translator: one of `INSTALLED` by its name, or the path as it is.

    A file or folder that is there comes first.

    >>> translator_folder("english_french") == ENGLISH_FRENCH, translator_folder("runs/mine").as_posix()
    (True, 'runs/mine')
    """
    path = path_of("folder", name)
    return path if path.exists() else INSTALLED.get(path.as_posix(), path)


Precision = Literal["bfloat16", "float16", "float32"]
"""The dtype of the weights in an exported file; they are computed with in float32."""


def export(folder: str | Path, to: str | Path, *, which: Which = "best", dtype: Precision = "bfloat16") -> Path:
    """Write the files that translating needs into another folder, and return its path.

    The folder gets experiment.yaml, both vocabularies, the chosen weights, as best.safetensors, and alignment.json,
    trust.json and placeholders.json where the run has them; it is made if it is not there, and what else it holds
    stays. All that takes the folder of a run takes it, but that no training goes on from it. The experiment's
    `data.folder` is left out: it says where the text was on this machine.

    Raises:
        CheckpointError: the run lacks a file; a weight is too large for `dtype`; the folder holds a run of its own, or
            cannot be written.
        ConfigurationError: there is no such `which` or `dtype`.
    """
    run, exported = RunFolder(Path(folder)), RunFolder(Path(to))
    if dtype not in get_args(Precision):
        raise ConfigurationError(f"dtype is {dtype!r}; {nearest(dtype, get_args(Precision))}")
    weights = run.weights(which)
    if exported.last.exists() or exported.state.exists():
        raise CheckpointError(
            f"{exported.path} holds a training run, which an export would damage; name another folder"
        )
    tensors, header = load_weights(weights)
    rounded = _rounded(tensors, getattr(torch, dtype), weights)
    experiment = Experiment.load(run.experiment)
    data = experiment.data.model_copy(update={"folder": Path()})
    try:
        exported.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {exported.path} ({error.strerror})") from None
    experiment.model_copy(update={"data": data}).save(exported.experiment)
    chosen = [file.name for file in (run.alignment, run.trust, run.placeholders) if file.exists()]
    for name in (run.source_vocabulary.name, run.target_vocabulary.name, *chosen):
        with atomic_write(exported.path / name) as partial:
            shutil.copyfile(run.path / name, partial)
    save_tensors(rounded, exported.best, {**header, "exported": {"weights": which, "dtype": dtype}})
    return exported.path


def _rounded(tensors: dict[str, Tensor], dtype: torch.dtype, path: Path) -> dict[str, Tensor]:
    """Cast floating-point tensors to a dtype; a tensor with several names stays shared."""
    by_identity: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if tensor.is_floating_point() and not bool(rounded.isfinite().all()):
            largest = tensor.abs().max().item()
            state = f"as large as {largest:.3g}" if math.isfinite(largest) else "that are no finite numbers"
            raise CheckpointError(
                f"{path} has weights {state} in {name}, and {str(dtype).removeprefix('torch.')} goes to "
                f"{torch.finfo(dtype).max:.3g}: choose another dtype, or other weights"
            )
        by_identity[id(tensor)] = rounded
    return {name: by_identity[id(tensor)] for name, tensor in tensors.items()}


def average(folder: str | Path, *, last: int | None = None, best: int | None = None) -> Path:
    """Average weights that a run has saved, write average.safetensors into its folder, and return its path.

    `last` takes the latest ones, `best` those that validated best; with neither it is all that are there. A run keeps
    weights where its settings have `training.keep_last` or `training.keep_best`.

    Raises:
        ConfigurationError: both are given, or a number below 1.
        CheckpointError: the run has kept fewer, or none, or they do not fit together; the disk is full.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 6.1, who average the last 5 checkpoints, or 20.
    """
    run = RunFolder(Path(folder))
    if last is not None and best is not None:
        raise ConfigurationError("average takes the last weights or the best ones: give last= or best=, not both")
    count = last if last is not None else best
    if count is not None and count < 1:
        raise ConfigurationError(f"the number of weights to average is {count}; it needs to be at least 1")
    kept = _saved_files(run)
    if not kept or (count is not None and count > len(kept)):
        raise CheckpointError(
            f"{run.path} has kept {len(kept) or 'no'} weights{f', and {count} were asked for' if count else ''}: a run "
            "keeps those of its stops where it is trained with training.keep_last=N or training.keep_best=N"
        )
    chosen = kept if count is None else kept[-count:] if best is None else _by_score(kept)[:count]
    tensors, header = mean(chosen)
    save_tensors(tensors, run.average, header)
    return run.average


def mean(paths: Sequence[Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Mean of the weights in several files, and the header of the last file with the updates of all.

    What is no floating-point number has to be the same in all. Sums are in double precision.

    Raises:
        CheckpointError: a file cannot be read, or is of another model than the first.
    """
    first, header = load_weights(paths[0])
    sums = {name: tensor.double() for name, tensor in _one_name_each(first).items()}
    updates = [header.get("update")]
    for path in paths[1:]:
        tensors, header = load_weights(path)
        _check_alike(paths[0], first, path, tensors)
        updates.append(header.get("update"))
        for name, total in sums.items():
            total += tensors[name]
    by_identity = {
        id(first[name]): (total / len(paths)).to(first[name].dtype) if first[name].is_floating_point() else first[name]
        for name, total in sums.items()
    }
    return {name: by_identity[id(tensor)] for name, tensor in first.items()}, {**header, "averaged_updates": updates}


def delete_old_weights(run: RunFolder, keep_last: int, keep_best: int) -> None:
    """Delete saved weights that are neither among the last nor among the best."""
    kept = _saved_files(run)
    staying = {*kept[len(kept) - min(keep_last, len(kept)) :], *_by_score(kept)[:keep_best]}
    for path in kept:
        if path not in staying:
            path.unlink()


def _saved_files(run: RunFolder) -> list[Path]:
    """Files of the weights saved during a run, earliest first."""
    return sorted(run.saved_weights.glob("update-*.safetensors"))


def _by_score(paths: Sequence[Path]) -> list[Path]:
    """Files sorted by validation loss, best first; without validation, latest first."""
    scores = [read_header(path).get("scores", {}).get("validation_loss", 0.0) for path in paths]
    return [paths[place] for place in sorted(range(len(paths)), key=lambda place: (scores[place], -place))]


def _one_name_each(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor under one of its names, the first."""
    names: dict[int, str] = {}
    return {name: tensor for name, tensor in tensors.items() if names.setdefault(id(tensor), name) == name}


def _check_alike(first: Path, one: dict[str, Tensor], path: Path, other: dict[str, Tensor]) -> None:
    for name in {**one, **other}:
        if name not in one or name not in other or one[name].shape != other[name].shape:
            raise CheckpointError(f"{path} is of another model than {first}: they differ in {name}")
        if not one[name].is_floating_point() and not torch.equal(one[name], other[name]):
            raise CheckpointError(f"{path} and {first} have different numbers in {name}, which cannot be averaged")
