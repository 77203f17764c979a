"""A recipe: the YAML of an experiment with a section `compare`, which says what to vary and how to measure it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, model_validator

from regard.errors import ConfigurationError, nearest
from regard.language.language_experiment import TASKS
from regard.translation.config_errors import unknown_keys, wrong_values
from regard.translation.date_demo import date_experiment, write_corpus
from regard.translation.experiment import TRANSLATION, read_mapping, set_key
from regard.translation.settings import Count, Section, WholeNumber

DATES: Final = "dates"
"""The recipe that needs no file: dates in the formats of 25 locales, generated, to be written as ISO 8601."""

MeasureName = Literal["bleu", "exact", "cross-entropy", "bits-per-byte"]

MEASURES: dict[str, tuple[MeasureName, ...]] = {
    TRANSLATION: ("bleu", "exact", "cross-entropy"),
    "language-model": ("bits-per-byte",),
}
"""Measures of quality by task; the first is the default."""


class ComparisonSettings(Section):
    """What a comparison varies, with which seeds, and what it measures."""

    question: str | None = None
    """What the comparison asks, as the page and the table say it."""
    vary: dict[str, list[Any] | None] = Field(default_factory=dict)
    """Values by short name or key path; null: the values that the short name stands for. Several are combined."""
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Variants by name, each a mapping of key paths to values; combined with `vary` where both are there."""
    seeds: Annotated[tuple[WholeNumber, ...], Field(min_length=1)] = (1, 2, 3)
    """Seeds of initialisation, dropout and batches; each variant is trained once with each."""
    measure: MeasureName | None = None
    """The quality: bleu, exact (share of sentences translated letter for letter), cross-entropy (nats per target
    token), bits-per-byte; null: bleu for a translator, bits-per-byte for a language model."""
    baseline: str | None = None
    """The variant that the others are tested against; null: the first that can be trained."""
    lengths: tuple[Count, ...] = ()
    """Upper ends of classes of source length, in tokens: the quality is also measured in each class of test pairs."""
    decode: WholeNumber = 0
    """Bytes that a language model generates, one at a time, to measure the speed of decoding; 0: none."""
    gradients: bool = False
    """Whether the gradients of the query and key projections are measured, before and after training."""
    corpus: Literal["dates"] | None = None
    """Text that is generated in place of `data`: dates in the formats of 25 locales, to be written as ISO 8601."""

    @model_validator(mode="after")
    def _values_differ(self) -> ComparisonSettings:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"compare.seeds {list(self.seeds)} has a seed twice, whose runs would be the same: name different seeds"
            )
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"compare.lengths {list(self.lengths)} needs to rise from each length to the next")
        return self


@dataclass(frozen=True)
class Recipe:
    """An experiment as nested mappings, as its YAML has it, and what to compare; `origin` prefixes messages."""

    origin: str
    experiment: Mapping[str, Any]
    compare: ComparisonSettings

    @property
    def task(self) -> str:
        """The task of the experiment."""
        return self.experiment.get("task", TRANSLATION)

    @property
    def name(self) -> str:
        """The name of the experiment, whose folder is comparisons/NAME by default."""
        name = self.experiment.get("name")
        return name if isinstance(name, str) else "comparison"

    @property
    def measure(self) -> MeasureName:
        """The measure of quality."""
        if self.compare.measure is not None:
            return self.compare.measure
        return "exact" if self.compare.corpus == DATES else MEASURES[self.task][0]

    def with_corpus(self, folder: Path) -> Recipe:
        """The recipe with its generated corpus, if it has one, written into a folder; files already there stay."""
        if self.compare.corpus is None:
            return self
        data = folder / DATES
        parts = ("train", "validation", "test")
        if not all((data / f"{part}.tsv").is_file() for part in parts):
            write_corpus(data)
        text = {"folder": str(data), **{part: {"tsv": f"{part}.tsv"} for part in parts}}
        return Recipe(
            self.origin, {**self.experiment, "data": {**self.experiment.get("data", {}), **text}}, self.compare
        )


def load_recipe(path: str | Path, overrides: Iterable[str] = (), options: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe: the YAML file of an experiment, with a section `compare` or without; or the word "dates".

    Args:
        path: the file, or `DATES`.
        overrides: as of `regard train`, such as "training.max_epochs=3" or "compare.seeds=[1, 2]".
        options: keys of the section `compare` that replace the file's.

    Raises:
        ConfigurationError: the file cannot be read, there is no such task, or the section `compare` has an unknown key,
            a wrong value, or a measure of another task.

    >>> recipe = load_recipe("dates", options={"seeds": [1, 2]})
    >>> recipe.measure, recipe.compare.seeds, recipe.experiment["model"]["decoder"]["kind"]
    ('exact', (1, 2), 'luong')
    """
    if str(path) == DATES and not Path(path).is_file():
        data = _date_recipe()
        for override in overrides:
            set_key(data, override)
    else:
        data = read_mapping(Path(path), overrides)
    task = data.get("task", TRANSLATION)
    if not isinstance(task, str) or task not in TASKS:
        raise ConfigurationError(f"{path}: task: there is no task {task!r}; {nearest(str(task), TASKS)}")
    section = data.pop("compare", None) or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"{path}: compare: has {section!r}; it needs to be a section with keys such as 'vary' and 'seeds'"
        )
    settings = _comparison_settings({**section, **(options or {})}, str(path))
    _check_task(settings, task, str(path))
    return Recipe(str(path), data, settings)


def _check_task(settings: ComparisonSettings, task: str, origin: str) -> None:
    """Check that the task has what is to be measured.

    Raises:
        ConfigurationError: it has not.
    """
    if settings.measure is not None and settings.measure not in MEASURES[task]:
        raise ConfigurationError(
            f"{origin}: compare.measure: has {settings.measure!r}, which the task {task!r} does not have; "
            f"{nearest(settings.measure, MEASURES[task])}"
        )
    translates = task == TRANSLATION
    others = (("lengths", translates), ("gradients", translates), ("corpus", translates), ("decode", not translates))
    for key, fits in others:
        if getattr(settings, key) and not fits:
            raise ConfigurationError(
                f"{origin}: compare.{key}: has {getattr(settings, key)!r}, which is for "
                f"{'language models' if translates else 'translators'}; leave it out"
            )


def _date_recipe() -> dict[str, Any]:
    """The recipe of dates: Luong's decoder of the demo, trained for two epochs."""
    data = date_experiment({"kind": "luong", "score": "general"})
    data |= {"name": DATES, "search": {"beam": 1}, "training": {**data["training"], "max_epochs": 2}}
    data["compare"] = {"corpus": DATES, "question": "Dates of 25 locales, to be written as ISO 8601."}
    return data


def _comparison_settings(section: Mapping[str, Any], origin: str) -> ComparisonSettings:
    problems = list(unknown_keys(section, ComparisonSettings, root=ComparisonSettings))
    if not problems:
        try:
            return ComparisonSettings.model_validate(section)
        except ValidationError as error:
            problems = list(wrong_values(error, section))
    raise ConfigurationError(
        "\n".join(f"{origin}: {'' if text.startswith('compare.') else 'compare.'}{text}" for text in problems)
    )
