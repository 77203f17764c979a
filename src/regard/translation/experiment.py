"""The settings of an experiment, read from one YAML file and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from regard.errors import ConfigurationError
from regard.translation import yaml12
from regard.translation.config_errors import unknown_keys, wrong_values
from regard.translation.settings import (
    DataSettings,
    ModelSettings,
    RecurrentSettings,
    SearchSettings,
    Section,
    TrainingSettings,
    TransformerSettings,
    VocabularyChoice,
    WholeNumber,
)
from regard.translation.vocabulary import VocabularySettings
from regard.utils.atomic_files import atomic_write

TRANSLATION: Final = "translation"
"""The task of a file that names none."""


class YAMLExperiment(Section):
    """Base of the experiments of all tasks: all settings of a run, read from one YAML file and checked."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the run; its folder is runs/NAME unless `--folder` names another."""

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Self:
        """Read the experiment of a YAML file, with overrides such as `training.max_epochs=3`.

        What the file of a translator with `training.start_from` leaves out of `vocabulary` and `model` is read from the
        experiment.yaml beside those weights.

        Raises:
            ConfigurationError: the file is missing, is not YAML or not a mapping, or holds a key twice; it is of
                another task; a key is unknown; a value is missing, mistyped or impossible; an override is not
                `key=value`; the file beside `training.start_from` is needed, and missing or no YAML.
        """
        return cls.from_mapping(read_mapping(Path(path), overrides), origin=str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, origin: str = "experiment") -> Self:
        """Build an experiment from nested mappings; `origin` prefixes each error message.

        Raises:
            ConfigurationError: as for `load`.
        """
        own = cls.model_fields["task"].default
        if (task := data.get("task", TRANSLATION)) != own:
            raise ConfigurationError(f"{origin}: task: has {task!r}, needs to be {own!r}")
        data = cls.completed(data, origin)
        problems = list(unknown_keys(data, cls, root=cls))
        if not problems:
            try:
                return cls.model_validate(data)
            except ValidationError as error:
                problems = list(wrong_values(error, data))
        raise ConfigurationError("\n".join(f"{origin}: {problem}" for problem in problems))

    @classmethod
    def completed(cls, data: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """The mapping with the sections that are read from other files; `origin` prefixes each error message."""
        return data

    def dump(self) -> str:
        """The YAML that loads back to an equal experiment, every default written out."""
        return yaml12.dump(self.model_dump(mode="json"))

    def save(self, path: str | Path) -> None:
        """Write `dump()` to a file, replaced atomically.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with atomic_write(path) as partial:
            partial.write_text(self.dump(), encoding="utf-8")

    def differences(self, other: Self) -> list[str]:
        """The dotted keys in which two experiments differ.

        >>> files = {"source": "train.en", "target": "train.de"}
        >>> one, other = (
        ...     Experiment.from_mapping({"name": "toy", "data": {"train": files}, "seed": seed}) for seed in (1, 2)
        ... )
        >>> one.differences(other)
        ['seed']
        """
        ours, theirs = (experiment.values_by_key() for experiment in (self, other))
        return [key for key in ours | theirs if ours.get(key, ...) != theirs.get(key, ...)]


class Experiment(YAMLExperiment):
    """All settings of the run of a translator: data, vocabulary, model, training, search.

    >>> files = {"source": "train.en", "target": "train.de"}
    >>> experiment = Experiment.from_mapping({"name": "toy", "data": {"train": files}, "model": {"cell": "lstm"}})
    >>> experiment.model.cell, experiment.training.max_epochs
    ('lstm', 30)
    """

    task: Literal["translation"] = TRANSLATION
    """What is trained; `language-model` has keys of its own (docs/yaml-language-model.md)."""
    seed: WholeNumber = 1
    """Seed of initialisation, dropout and the order of the batches."""
    data: DataSettings
    """Where the text is."""
    vocabulary: VocabularyChoice = VocabularySettings()
    """How text becomes ids: one mapping for both sides, or one each under `source` and `target`."""
    model: ModelSettings = RecurrentSettings()
    """The model to train."""
    training: TrainingSettings = TrainingSettings()
    """How to train it."""
    search: SearchSettings = SearchSettings()
    """How to translate with it."""

    @model_validator(mode="after")
    def _scores_need_validation_text(self) -> Experiment:
        if not self.data.validates and self.training.patience is not None:
            raise ValueError(
                "training.patience counts validations and needs text for them: set data.validation or data.split"
            )
        if not self.data.validates and self.training.decay.kind == "plateau":
            raise ValueError(
                "training.decay plateau waits for validations and needs text for them: "
                "set data.validation or data.split"
            )
        return self

    @model_validator(mode="after")
    def _one_table_needs_one_vocabulary(self) -> Experiment:
        shared = isinstance(self.vocabulary, VocabularySettings) and self.vocabulary.shared
        if isinstance(self.model, TransformerSettings) and self.model.shared_embeddings == "all" and not shared:
            raise ValueError(
                "model.shared_embeddings 'all' is one table for the words of both sides and needs a vocabulary of "
                "both: set vocabulary.shared, or write shared_embeddings: target"
            )
        return self

    @classmethod
    def completed(cls, data: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
        """Complete vocabulary and model from the run of `training.start_from`, if there is one.

        A section with a kind is complete. So the experiment.yaml of a run, which has every key, needs no other run.
        """
        return _completed_from_start(data, origin)


def _completed_from_start(data: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """Complete vocabulary and model from the run of `training.start_from`, if there is one."""
    sections = [key for key in ("vocabulary", "model") if not _stands_alone(data.get(key, {}))]
    training = data.get("training")
    start = training.get("start_from") if isinstance(training, Mapping) else None
    if not sections or not isinstance(start, str | Path):
        return data
    before = Path(start).parent / "experiment.yaml"
    if not before.is_file():
        raise ConfigurationError(
            f"{origin}: training.start_from: there is no {before}, which has what is not told of "
            f"{' and '.join(sections)}: name weights in the folder of their run, or write these sections whole, with "
            "their kind, as they are in the experiment.yaml of a run that has begun"
        )
    there = {key: _spelled_out(section) for key, section in read_mapping(before).items()}
    whole = {key: {**there[key], **data.get(key, {})} for key in sections if isinstance(there.get(key), Mapping)}
    return {**data, **whole}


def _stands_alone(section: Any) -> bool:
    return not isinstance(section, Mapping) or not section.keys().isdisjoint({"kind", "source", "target"})


def _spelled_out(section: Any) -> Any:
    """Normalise a section to a mapping: a plain name is its kind, a missing section has no keys."""
    return {"kind": section} if isinstance(section, str) else section or {}


def read_mapping(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The keys of a YAML file, with overrides such as `training.max_epochs=3`.

    Raises:
        ConfigurationError: the file is missing, is not YAML or not a mapping, or holds a key twice; an override is not
            `key=value`.
    """
    try:
        data = yaml12.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{path}: cannot be read ({error.strerror}); name the YAML file of an experiment"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {_yaml_problem(error)}") from None
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{path}: holds {type(data).__name__}, not a mapping of keys such as 'name' and 'data'"
        )
    for override in overrides:
        set_key(data, override)
    return data


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else f"is not YAML: {problem}"


def set_key(data: dict[str, Any], override: str) -> None:
    """Set `a.b=c` in nested mappings, in place; c is YAML.

    Raises:
        ConfigurationError: the override is not `key=value`, c is no YAML, or a holds no keys.
    """
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigurationError(f"--set {override!r} is not of the form key=value, for instance training.max_epochs=3")
    try:
        value = yaml12.parse(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--set {override!r}: the value: {_yaml_problem(error)}") from None
    set_value(data, path, value, f"--set {override!r}")


def set_value(data: dict[str, Any], path: Sequence[str], value: Any, origin: str) -> None:
    """Set the value at a path of keys in nested mappings; only the outermost mapping is changed in place.

    Raises:
        ConfigurationError: what is on the way holds no keys; `origin` prefixes the message.

    >>> data = {"model": {"decoder": "luong"}}
    >>> set_value(data, ["model", "decoder", "score"], "dot", "here")
    >>> data
    {'model': {'decoder': {'kind': 'luong', 'score': 'dot'}}}
    """
    for depth, key in enumerate(path[:-1]):
        inner = _spelled_out(data.get(key))
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{origin}: {'.'.join(path[: depth + 1])} is {inner!r} and holds no keys")
        data[key] = dict(inner)
        data = data[key]
    data[path[-1]] = value
