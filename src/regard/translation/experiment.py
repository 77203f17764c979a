"""One experiment, as the small YAML that says all of it.

What is wrong with an experiment's keys and values, in the words of the YAML that the user wrote.

YAML as people mean it: the core schema of YAML 1.2 and no key twice.

PyYAML follows YAML 1.1, where `no` (Norwegian) is False, `1e-3` is a string, `010` is 8, `12:30` is 750 and a date is
an object. Here a plain word is true, false, null or a decimal number if it looks like one, and text otherwise.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from yaml.constructor import ConstructorError
from yaml.nodes import MappingNode, ScalarNode

from regard.errors import ConfigurationError, nearest
from regard.translation.settings import (
    DataSettings,
    ModelSettings,
    RecurrentSettings,
    SearchSettings,
    Settings,
    TrainingSettings,
    TransformerSettings,
    VocabularyChoice,
    WholeNumber,
)
from regard.translation.vocabulary import VocabularySettings
from regard.utils.atomic_files import atomic_write

KeyPath = tuple[str, ...]


def unknown_keys(data: Any, annotation: Any, root: type[BaseModel], path: KeyPath = ()) -> Iterator[str]:
    """Every key, and every `kind`, that is not known at its place, with the nearest that is."""
    candidates = _sections(annotation)
    kinds = {kind: section for section in candidates for kind in _kinds(section)}
    kind = data.get("kind") if isinstance(data, Mapping) else data
    if kinds and isinstance(kind, str) and kind not in kinds:
        yield f"{_dotted(path)}: there is no kind {kind!r}; {nearest(kind, kinds)}"
    elif candidates and isinstance(data, Mapping):
        section = kinds[kind] if kind in kinds else max(candidates, key=lambda one: len(one.model_fields.keys() & data))
        for key, value in data.items():
            field = section.model_fields.get(key)
            here = (*path, str(key))
            if field is None:
                others = [other for other, known in kinds.items() if key in known.model_fields]
                yield f"{_dotted(here)}: unknown key; {_mend(str(key), section, others, root)}"
            else:
                yield from unknown_keys(value, field.annotation, root, here)


def wrong_values(error: ValidationError, data: Any) -> Iterator[str]:
    """What pydantic found, one line per key: what it has and what it needs."""
    needs: dict[KeyPath, list[str]] = {}
    has: dict[KeyPath, str] = {}
    for detail in error.errors(include_url=False):
        path = _path_in(data, detail)
        needs.setdefault(path, []).append(_need(detail))
        has.setdefault(path, _shown(detail["input"]))
        if "error" in detail.get("ctx", {}) and isinstance(detail["input"], Mapping):
            has[path] = ""  # a rule about several keys names them itself
        if detail["type"] == "missing":
            has[path] = ""
    for path, reasons in needs.items():
        if any(other[: len(path)] == path for other in needs if other != path):
            continue  # what is wrong is further in
        place = f"{_dotted(path)}: " if path else ""
        yield f"{place}{has[path]}{' or '.join(dict.fromkeys(reasons))}".replace(" or needs to be ", " or ")


def _mend(key: str, section: type[BaseModel], kinds: list[str], root: type[BaseModel]) -> str:
    if kinds:
        return f"only the kind {' or '.join(map(repr, kinds))} has it"
    elsewhere = dict.fromkeys(_dotted(place) for place in _places(key, root) if key != "kind")
    if elsewhere:
        return f"it belongs elsewhere: write {' or '.join(elsewhere)}"
    return nearest(key, section.model_fields)


def _places(name: str, annotation: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Where in the tree of sections a key of this name is known."""
    for section in _sections(annotation):
        for key, field in section.model_fields.items():
            if key == name:
                yield (*path, key)
            yield from _places(name, field.annotation, (*path, key))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The settings classes that a field of this annotation can hold."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _sections(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [section for option in typing.get_args(annotation) for section in _sections(option)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get("kind")
    return typing.get_args(field.annotation) if field and typing.get_origin(field.annotation) is Literal else ()


def _path_in(data: Any, detail: ErrorDetails) -> KeyPath:
    """The keys of pydantic's location that the data has: it also names the member of a union that it tried."""
    path: list[str] = []
    for step in detail["loc"]:
        try:
            data = data[step]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(str(step))
    if detail["type"] == "missing":
        path.append(str(detail["loc"][-1]))
    return tuple(path)


def _need(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is missing"
    if detail["type"] == "extra_forbidden":  # `unknown_keys` let it pass, so that another kind has it
        return "which only another kind has: write the 'kind' beside it"
    if detail["type"] == "union_tag_not_found":
        return "needs the key 'kind'"
    message = detail["msg"].removeprefix("Value error, ")
    needed = message.removeprefix("Input should be ")
    return message if needed == message else f"needs to be {needed}"


def _shown(value: Any) -> str:
    text = repr(value)
    return f"has {text if len(text) <= 80 else text[:77] + '...'}, "


def _dotted(path: KeyPath) -> str:
    return ".".join(path)


CORE_SCHEMA = [
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
]
"""Tag, pattern of a plain word that has it, and the characters such a word can start with (NUL: none at all)."""


def _add_core_schema(resolver: type[yaml.SafeLoader] | type[yaml.SafeDumper]) -> None:
    for tag, pattern, first in CORE_SCHEMA:
        characters = ["" if character == "\0" else character for character in first]
        resolver.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})\\Z"), characters)


class _Loader(yaml.SafeLoader):
    """A safe loader with the core schema, which refuses a key that is there twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (a class attribute by PyYAML's design)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode) or key.tag.endswith(":merge"):
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                first = lines[key.value]
                raise ConstructorError(
                    None, None, f"the key {key.value!r} is there twice, first in line {first}", key.start_mark
                )
            lines[key.value] = line
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node: ScalarNode) -> int:
        return int(self.construct_scalar(node))


class _Dumper(yaml.SafeDumper):
    """A safe dumper that quotes whatever either version of YAML would take for something other than text."""

    def represent_text(self, value: str) -> ScalarNode:
        # In double quotes all that breaks a line is escaped; PyYAML's other styles lose U+0085, for one.
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=None if value.isprintable() else '"')


_add_core_schema(_Loader)
_add_core_schema(_Dumper)
_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_decimal)


def parse(text: str) -> Any:
    r"""The value that the YAML text spells; raises yaml.YAMLError.

    >>> parse("language: no\nrate: 1e-3\nname: 2020-03-14\ncode: 010")
    {'language': 'no', 'rate': 0.001, 'name': '2020-03-14', 'code': 10}
    """
    return yaml.load(text, Loader=_Loader)  # a SafeLoader underneath: builds plain values only


def format(value: Any) -> str:  # noqa: A001 (the module's name says of what)
    r"""The YAML text from which `parse`, and any reader of YAML 1.1 or 1.2, gets the value back.

    >>> format({"language": "no", "rate": 0.001, "name": "1e-3"})
    "language: 'no'\nrate: 0.001\nname: '1e-3'\n"
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class Experiment(Settings):
    """Everything that decides what a run does: data, vocabulary, model, training, search.

    >>> files = {"source": "train.en", "target": "train.de"}
    >>> experiment = Experiment.from_mapping({"name": "toy", "data": {"train": files}, "model": {"cell": "lstm"}})
    >>> experiment.model.cell, experiment.training.max_epochs
    ('lstm', 30)
    """

    name: Annotated[str, Field(min_length=1)]
    seed: WholeNumber = 1
    data: DataSettings
    vocabulary: VocabularyChoice = VocabularySettings()
    model: ModelSettings = RecurrentSettings()
    training: TrainingSettings = TrainingSettings()
    search: SearchSettings = SearchSettings()

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
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
        """The experiment that a YAML file holds, with overrides such as `training.max_epochs=3` put in.

        What a file with `training.start_from` does not tell of `vocabulary` and `model` is read from the
        experiment.yaml beside those weights.

        Raises:
            ConfigurationError: the file is missing, is not YAML or not a mapping, or holds a key twice; a key is
                unknown; a value is missing, mistyped or impossible; an override is not `key=value`; the file beside
                `training.start_from` is needed, and missing or no YAML.
        """
        data = _read_mapping(Path(path))
        for override in overrides:
            _override(data, override)
        return cls.from_mapping(data, origin=str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], *, origin: str = "experiment") -> Experiment:
        """The experiment that nested mappings spell; `origin` stands before each complaint.

        Raises:
            ConfigurationError: as for `load`.
        """
        data = _as_where_it_starts(data, origin)
        problems = list(unknown_keys(data, cls, root=cls))
        if not problems:
            try:
                return cls.model_validate(data)
            except ValidationError as error:
                problems = list(wrong_values(error, data))
        raise ConfigurationError("\n".join(f"{origin}: {problem}" for problem in problems))

    def dump(self) -> str:
        """The YAML that loads back to an equal experiment, every default written out."""
        return format(self.model_dump(mode="json"))

    def save(self, path: str | Path) -> None:
        """Write `dump()` to a file, which is the old one or the new one at any moment.

        Raises:
            CheckpointError: the file cannot be written.
        """
        with atomic_write(path) as partial:
            partial.write_text(self.dump(), encoding="utf-8")

    def differences(self, other: Experiment) -> list[str]:
        """The dotted keys in which two experiments differ.

        >>> files = {"source": "train.en", "target": "train.de"}
        >>> one, other = (
        ...     Experiment.from_mapping({"name": "toy", "data": {"train": files}, "seed": seed}) for seed in (1, 2)
        ... )
        >>> one.differences(other)
        ['seed']
        """
        ours, theirs = (_flat(experiment.model_dump(mode="json")) for experiment in (self, other))
        return [key for key in ours | theirs if ours.get(key, ...) != theirs.get(key, ...)]


def _as_where_it_starts(data: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """The mappings, with what they do not tell of vocabulary and model from the run that training starts from.

    A section that tells its kind stands for itself. So the file of a run, which tells all, needs no other run.
    """
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
    there = {key: _spelled_out(section) for key, section in _read_mapping(before).items()}
    whole = {key: {**there[key], **data.get(key, {})} for key in sections if isinstance(there.get(key), Mapping)}
    return {**data, **whole}


def _stands_alone(section: Any) -> bool:
    return not isinstance(section, Mapping) or not section.keys().isdisjoint({"kind", "source", "target"})


def _spelled_out(section: Any) -> Any:
    """A section's mapping, of which the kind alone may stand for it; one that is not there has no keys."""
    return {"kind": section} if isinstance(section, str) else section or {}


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        data = parse(path.read_text(encoding="utf-8"))
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
    return data


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else f"is not YAML: {problem}"


def _override(data: dict[str, Any], override: str) -> None:
    """Put `a.b=c` into nested mappings, in place; c is YAML."""
    name, equals, text = override.partition("=")
    path = name.strip().split(".")
    if not equals or not all(path):
        raise ConfigurationError(f"--set {override!r} is not of the form key=value, for instance training.max_epochs=3")
    try:
        value = parse(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--set {override!r}: the value: {_yaml_problem(error)}") from None
    for depth, key in enumerate(path[:-1]):
        inner = _spelled_out(data.get(key))
        if not isinstance(inner, dict):
            raise ConfigurationError(
                f"--set {override!r}: {'.'.join(path[: depth + 1])} is {inner!r} and holds no keys"
            )
        data[key] = dict(inner)
        data = data[key]
    data[path[-1]] = value


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
