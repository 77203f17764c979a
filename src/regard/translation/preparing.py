"""What a run needs before its first update: nothing is written before all of it has been read and found fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.batches import EncodedText, encode
from regard.translation.building import build_model
from regard.translation.checkpoint import LONGEST_SOURCE, read_header
from regard.translation.corpus import ParallelText
from regard.translation.experiment import Experiment
from regard.translation.runs import RunFolder
from regard.translation.settings import VocabularySettings, VocabularySides
from regard.translation.splitting import training_text
from regard.translation.starting import Start
from regard.translation.vocabulary import Vocabulary

Resume = Literal["auto", "never", "must"]
"""Whether a folder that holds a run is gone on with, refused, or needed."""

MAY_CHANGE = (
    "training.max_epochs",
    "training.max_updates",
    "training.keep_last",
    "training.keep_best",
    "training.max_minutes",
    "training.patience",
    "data.folder",
    "search.",
)
"""Keys, and sections, whose value does not touch an update: a run that is resumed may have others."""

MAY_CHANGE_WITHOUT_EXTRA = ("data.test.",)
"""The same where there are no extra pairs, which have nothing of what is tested on."""


@dataclass(frozen=True)
class Prepared:
    """A run that can begin, or go on."""

    vocabularies: tuple[Vocabulary, Vocabulary]
    model: nn.Module
    text: EncodedText
    validation: EncodedText | None
    about: Mapping[str, Any]
    """What the saved weights say of themselves."""

    def write(self, run: RunFolder, experiment: Experiment) -> None:
        """Make the folder, with the settings in effect and the vocabularies, those that are there left as they are.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {run.path} ({error.strerror})") from None
        experiment.save(run.experiment)
        for path, vocabulary in zip((run.source_vocabulary, run.target_vocabulary), self.vocabularies, strict=True):
            if not path.exists():
                vocabulary.save(path)


def prepare(experiment: Experiment, run: RunFolder, resume: Resume) -> Prepared:
    """Look at the folder, read the text, read or learn the vocabularies, and build the model, with what it starts from.

    Raises:
        ConfigurationError, CorpusError, VocabularyError, CheckpointError: as for `train`.
    """
    _refuse_other_run(run, experiment, resume)
    start = None if run.state.exists() else Start.of(experiment)
    text, held_out = training_text(experiment.data)
    source, target = vocabularies = _vocabularies(run, text, experiment.vocabulary, start)
    with isolate_rng():
        torch.manual_seed(experiment.seed)
        model = build_model(experiment.model, len(source), len(target))
    if start is not None:
        start.put_into(model)
    longest = model.max_source_length
    encoded = encode(text, source, target, min(experiment.data.max_length, longest or experiment.data.max_length))
    about = {
        "model": experiment.model.model_dump(mode="json"),
        "source_vocabulary": len(source),
        "target_vocabulary": len(target),
        **_longest_source(encoded, start.weights if start else run.last),
    }
    validation = None if held_out is None else encode(held_out, source, target, longest)
    return Prepared(vocabularies, model, encoded, validation, about)


def _refuse_other_run(run: RunFolder, experiment: Experiment, resume: Resume) -> None:
    """Make sure that the folder holds this run and no other."""
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
    run: RunFolder, text: ParallelText, settings: VocabularySettings | VocabularySides, start: Start | None
) -> tuple[Vocabulary, Vocabulary]:
    """The vocabularies in the folder; if they are not there, those of the start, or learned from the training text."""
    if run.source_vocabulary.exists() and run.target_vocabulary.exists():
        return run.vocabularies()
    return start.run.vocabularies() if start else _learn_vocabularies(text, settings)


def _learn_vocabularies(
    text: ParallelText, settings: VocabularySettings | VocabularySides
) -> tuple[Vocabulary, Vocabulary]:
    if isinstance(settings, VocabularySides):
        return Vocabulary.train(text.sources, settings.source), Vocabulary.train(text.targets, settings.target)
    if settings.shared:
        shared = Vocabulary.train([*text.sources, *text.targets], settings)
        return shared, shared
    return Vocabulary.train(text.sources, settings), Vocabulary.train(text.targets, settings)


def _longest_source(text: EncodedText, before: Path) -> dict[str, int]:
    """How many tokens the longest source has of all that the weights will have seen, in this run and before it.

    Nothing of weights that were saved before this was counted: what they saw is not known.
    """
    seen = read_header(before).get(LONGEST_SOURCE) if before.is_file() else 0
    return {} if seen is None else {LONGEST_SOURCE: max(int(text.sources.lengths.max()), seen)}
