"""The settings of an experiment, read from one YAML file and checked; docs/yaml.md, the page of all its keys.

`python -m regard.translation.experiment > docs/yaml.md` writes the page anew; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from regard.errors import ConfigurationError
from regard.translation import yaml12
from regard.translation.config_errors import kinds_of, sections_of, unknown_keys, wrong_values
from regard.translation.settings import (
    MAY_CHANGE,
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

    @model_validator(mode="after")
    def _a_pointer_needs_one_vocabulary(self) -> Experiment:
        shared = isinstance(self.vocabulary, VocabularySettings) and self.vocabulary.shared
        if isinstance(self.model, RecurrentSettings) and self.model.pointer and not shared:
            raise ValueError(
                "model.pointer says source tokens as words of the target and needs a vocabulary of both: set "
                "vocabulary.shared"
            )
        return self

    @model_validator(mode="after")
    def _losses_have_attention(self) -> Experiment:
        if isinstance(self.model, RecurrentSettings) and self.model.encoder_states == "last":
            for name in ("coverage_loss", "guided_alignment"):
                if getattr(self.training, name):
                    raise ValueError(
                        f"training.{name} is a loss of attention weights, and with model.encoder_states 'last' there "
                        "is no attention: leave one of the two out"
                    )
        return self

    @model_validator(mode="after")
    def _losses_of_attention_fit(self) -> Experiment:
        recurrent, guide = isinstance(self.model, RecurrentSettings), self.training.guided_alignment
        if self.training.coverage_loss and not recurrent:
            raise ValueError(
                "training.coverage_loss counts the weights of one attention to the source, and a Transformer has one "
                "for each layer and head: leave it out, or choose a model of kind recurrent"
            )
        if guide is not None and self.data.alignments is None:
            raise ValueError(
                "training.guided_alignment learns links of words and needs a file of them: data.alignments"
            )
        if guide is None and self.data.alignments is not None:
            raise ValueError("data.alignments is read by training.guided_alignment: set that, or leave the file out")
        if guide is not None and isinstance(self.model, TransformerSettings):
            for name, number, count in (
                ("layer", guide.layer or 0, self.model.decoder_layers),
                ("head", guide.head, self.model.num_heads),
            ):
                if number >= count:
                    raise ValueError(
                        f"training.guided_alignment.{name} is {number}, and the decoder has {count} {name}s, 0 to "
                        f"{count - 1}"
                    )
        elif guide is not None and (guide.layer is not None or guide.head):
            raise ValueError(
                "a recurrent translator has one attention to the source: leave layer and head of "
                "training.guided_alignment out"
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
            f"{origin}: training.start_from: there is no {before}, from which the incomplete "
            f"{' and '.join(sections)} would be read: name weights in the folder of their run, or write these sections "
            "whole, with their kind, as they are in the experiment.yaml of a run that has begun"
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
            f"{path}: cannot be read ({error.strerror}); name the YAML file of an experiment or of a preparation"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {_yaml_problem(error)}") from None
    if data is None:
        raise ConfigurationError(f"{path}: is empty; it needs keys such as 'name' and 'data'")
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


HEAD = """\
# The YAML of an experiment

One file is one experiment: `regard train experiment.yaml`. `name` and `data.train` are needed, every other key has a
default. Unknown keys are refused, with the nearest that is known; a key can be set on the command line, too:
`regard train experiment.yaml --set training.max_epochs=3`. Files with `task: language-model` have other keys:
[yaml-language-model.md](yaml-language-model.md). The smallest file:

    name: toy
    data:
      train: {source: train.en, target: train.de}

Where an option has a `kind`, its plain name is shorthand for it: `score: dot` is `score: {kind: dot}`. Words are read
as YAML 1.2 reads them: `no` is text, `1e-3` is a number.

{resuming}

This page is written by `python -m regard.translation.experiment`."""


def translation_reference() -> str:
    """The page docs/yaml.md as Markdown."""
    return settings_tables(HEAD.replace("{resuming}", _resuming()), Experiment)


def settings_tables(head: str, root: type[BaseModel]) -> str:
    """A page as Markdown: its head, and a table for each section of an experiment."""
    return "\n\n".join([head, *_tables(root, "", set())]) + "\n"


def _resuming() -> str:
    """The paragraph on the keys that may change when a run is resumed."""
    keys = ", ".join(f"`{key.rstrip('.')}`" for key in MAY_CHANGE)
    text = (
        "A run is resumed with the settings that it began with. These keys, on which no update depends, may change: "
        f"{keys}; and `data.test`, unless there is `data.extra`."
    )
    return "\n".join(textwrap.wrap(text, 120))


def _tables(section: type[BaseModel], path: str, written: set[type[BaseModel]]) -> Iterator[str]:
    """A table for a section, then those of the sections within it, each where it is first met."""
    written.add(section)
    yield f"## {_heading(section, path)}\n\n{_first_paragraph(section)}\n\n{_table(section)}"
    for key, field in section.model_fields.items():
        for inner in sections_of(field.annotation):
            if inner not in written:
                yield from _tables(inner, f"{path}.{key}".removeprefix("."), written)


def _heading(section: type[BaseModel], path: str) -> str:
    kinds = " or ".join(f"`{kind}`" for kind in kinds_of(section))
    return (f"`{path}`" if path else "The file") + (f" of kind {kinds}" if kinds else "")


def _first_paragraph(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").split("\n\n")[0].split())


def _table(section: type[BaseModel]) -> str:
    meanings = field_docstrings(section)
    rows = [
        f"| `{key}` | {_type(field)} | {_default(field)} | {meanings[key].replace('|', '&#124;')} |"
        for key, field in section.model_fields.items()
    ]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The string below each field of a class and of its bases, which pydantic does not store."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, BaseModel) or base is BaseModel:
            continue
        source = ast.parse(Path(inspect.getfile(base)).read_text(encoding="utf-8"))
        body = next(node.body for node in source.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for field, after in itertools.pairwise(body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _type(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = [f"{signs[name]} {getattr(one, name)}" for one in field.metadata for name in signs if hasattr(one, name)]
    return ", ".join([_type_name(field.annotation), *limits])


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner = FieldInfo.from_annotation(annotation)
        return _type_name(arguments[0]) if sections_of(annotation) else _type(inner)
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    if sections_of(annotation):
        kinds = [kind for section in sections_of(annotation) for kind in kinds_of(section)]
        null = " or null" if types.NoneType in arguments else ""
        return (f"kind: {', '.join(f'`{kind}`' for kind in kinds)}" if kinds else "section") + null
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    return {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null", Path: "path"}[
        annotation
    ]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.default
    if isinstance(value, BaseModel):
        return f"`{value.kind}`" if hasattr(value, "kind") else "its defaults"  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, tuple):
        return f"`[{', '.join(str(getattr(each, 'kind', each)) for each in value)}]`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    sys.stdout.write(translation_reference())
