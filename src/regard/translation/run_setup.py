"""Everything that a run needs before its first update, read and checked before anything is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from regard.errors import CheckpointError, ConfigurationError
from regard.models.recurrent import copies_words
from regard.translation.batches import EncodedText, encode
from regard.translation.build_model import build_model
from regard.translation.checkpoint import LONGEST_SOURCE, read_header, restore
from regard.translation.corpus import ParallelText
from regard.translation.data_split import training_text
from regard.translation.experiment import Experiment
from regard.translation.placeholders import Placeholders
from regard.translation.run_folder import RunFolder
from regard.translation.settings import (
    MAY_CHANGE,
    MAY_CHANGE_WITHOUT_EXTRA,
    SeparateVocabularySettings,
    VocabularySettings,
)
from regard.translation.vocabulary import Vocabulary


@dataclass(frozen=True)
class InitialWeights:
    """Weights of another run to fine-tune, with its vocabularies beside them."""

    weights: Path

    @classmethod
    def of_experiment(cls, experiment: Experiment) -> InitialWeights | None:
        """The initial weights of an experiment, checked against it; None where it has none.

        Raises:
            CheckpointError: there are no such weights, or what belongs to them is not beside them.
            ConfigurationError: they are of another model, or their run had another vocabulary (the keys are named), or
                what stands beside them as experiment.yaml is not one.
        """
        if experiment.training.start_from is None:
            return None
        start = cls(experiment.training.start_from)
        if not start.weights.is_file():
            state = "is a folder" if start.weights.is_dir() else "is not there"
            raise CheckpointError(
                f"training.start_from: {start.weights} {state}; it needs to be a file of weights in the folder of a "
                "run, such as runs/NAME/best.safetensors"
            )
        if missing := start.run.missing_for(start.weights):
            raise CheckpointError(
                f"training.start_from: the folder {start.run.path} has no {', '.join(missing)}; weights need to lie "
                "beside what `regard train` or `regard export` wrote with them"
            )
        before = Experiment.load(start.run.experiment)
        changed = [
            key
            for key in before.differences(experiment)
            if key.startswith(("model", "vocabulary")) and not key.endswith("dropout")
        ]
        if changed:
            raise ConfigurationError(
                f"training.start_from: {start.weights} is of a run with other settings: {', '.join(changed)}; write "
                f"these as they are in {start.run.experiment}"
            )
        return start

    @property
    def run(self) -> RunFolder:
        """The run folder that the weights are in."""
        return RunFolder(self.weights.parent)

    def load_into(self, model: nn.Module) -> None:
        """Copy the weights into a model, in its own precision; rows of words that are new there stay as they are.

        Raises:
            CheckpointError: they are damaged, or of another model.
        """
        restore(model, self.weights, grown=True)


Resume = Literal["auto", "never", "must"]
"""The treatment of a run that the folder holds: it is resumed (auto), refused (never), or required (must)."""


@dataclass(frozen=True)
class PreparedRun:
    """Model, text and vocabularies of a run that can begin or resume."""

    vocabularies: tuple[Vocabulary, Vocabulary]
    model: nn.Module
    text: EncodedText
    validation: EncodedText | None
    about: Mapping[str, Any]
    """Header of the saved weights."""
    placeholders: Placeholders | None = None
    """What stands for the copied parts of the text."""

    def write(self, run: RunFolder, experiment: Experiment) -> None:
        """Write the settings in effect and the vocabularies into the run's folder; existing vocabularies are unchanged.

        Raises:
            CheckpointError: a file cannot be written.
        """
        experiment.save(run.experiment)
        for path, vocabulary in zip((run.source_vocabulary, run.target_vocabulary), self.vocabularies, strict=True):
            if not path.exists():
                vocabulary.save(path)
        if self.placeholders is not None:
            self.placeholders.save(run.path)


def prepare(experiment: Experiment, run: RunFolder, resume: Resume) -> PreparedRun:
    """Check the folder, read the text, read or learn the vocabularies, build the model, and load its initial weights.

    Raises:
        ConfigurationError, CorpusError, VocabularyError, CheckpointError: as for `train`.
    """
    refuse_other_run(run, experiment, resume)
    placeholders = experiment.data.placeholders
    placed = None if placeholders is None else Placeholders.read(experiment.data.folder / placeholders)
    start = None if run.state.exists() else InitialWeights.of_experiment(experiment)
    text, held_out = training_text(experiment.data)
    source, target = vocabularies = _vocabularies(run, text, experiment, start)
    with isolate_rng():
        torch.manual_seed(experiment.seed)
        model = build_model(experiment.model, len(source), len(target))
    if start is not None:
        start.load_into(model)
    longest = model.max_source_length
    copies = copies_words(model)
    most = min(experiment.data.max_length, longest or experiment.data.max_length)
    encoded = encode(text, source, target, most, copies=copies)
    about = {
        "model": experiment.model.model_dump(mode="json"),
        "source_vocabulary": len(source),
        "target_vocabulary": len(target),
        **_longest_source(encoded, start.weights if start else run.last),
    }
    validation = None if held_out is None else encode(held_out, source, target, longest, copies=copies)
    return PreparedRun(vocabularies, model, encoded, validation, about, placed)


def refuse_other_run(run: RunFolder, experiment: Experiment, resume: Resume) -> None:
    """Check that the folder contains this run or none.

    Raises:
        ConfigurationError: it holds a run of other settings, or any run where `resume` is "never".
        CheckpointError: there is no state, and `resume` is "must".
    """
    if run.experiment.exists():
        if resume == "never" and rank_zero_only.rank == 0:
            raise ConfigurationError(f"{run.path} already holds a run; choose another folder, or let it be resumed")
        free = MAY_CHANGE if experiment.data.extra else MAY_CHANGE + MAY_CHANGE_WITHOUT_EXTRA
        changed = [key for key in Experiment.load(run.experiment).differences(experiment) if not key.startswith(free)]
        if changed:
            raise ConfigurationError(
                f"{run.path} holds a run with other settings: {', '.join(changed)}; "
                "give this one another folder, or the settings that the run began with"
            )
    if resume == "must" and not run.state.exists():
        raise CheckpointError(f"{run.path} has no state to resume from: {run.state} does not exist")


def _vocabularies(
    run: RunFolder,
    text: ParallelText,
    experiment: Experiment,
    start: InitialWeights | None,
) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies of the folder, else those of the initial weights, else learned from the training text."""
    if run.source_vocabulary.exists() and run.target_vocabulary.exists():
        return run.vocabularies()
    if start is None:
        return _learn_vocabularies(text, experiment.vocabulary)
    source, target = start.run.vocabularies()
    needed = experiment.training.new_characters
    if needed is None:
        return source, target
    settings = experiment.vocabulary
    if isinstance(settings, VocabularySettings) and settings.shared:
        shared = source.with_characters(_characters([*text.sources, *text.targets], needed))
        return shared, shared
    return (
        source.with_characters(_characters(text.sources, needed)),
        target.with_characters(_characters(text.targets, needed)),
    )


def _characters(lines: list[str], times: int) -> list[str]:
    """The characters that lines have so many times, sorted."""
    counts = Counter[str]()
    for line in lines:
        counts.update(line)
    return sorted(character for character, count in counts.items() if count >= times)


def _learn_vocabularies(
    text: ParallelText, settings: VocabularySettings | SeparateVocabularySettings
) -> tuple[Vocabulary, Vocabulary]:
    if isinstance(settings, SeparateVocabularySettings):
        return Vocabulary.train(text.sources, settings.source), Vocabulary.train(text.targets, settings.target)
    if settings.shared:
        shared = Vocabulary.train([*text.sources, *text.targets], settings)
        return shared, shared
    return Vocabulary.train(text.sources, settings), Vocabulary.train(text.targets, settings)


def _longest_source(text: EncodedText, before: Path) -> dict[str, int]:
    """Header entry: tokens of the longest source that the weights are trained on, in this run and before it.

    Empty where the earlier weights do not say theirs.
    """
    seen = read_header(before).get(LONGEST_SOURCE) if before.is_file() else 0
    return {} if seen is None else {LONGEST_SOURCE: max(int(text.sources.lengths.max()), seen)}
